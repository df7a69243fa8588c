"""Workspace rules of convolutions.

cuDNN or kernels of PyTorch run a convolution. cuDNN's workspace depends on which of its engines its
heuristics choose; `Target.conv_workspaces` returns it for each call. `native_convolution` has the workspaces
of PyTorch's kernels.
"""

from collections.abc import Mapping
from typing import Any

import torch

from planner.capture.workspaces._rule import released
from planner.capture.workspaces.nn.conv_operands import (
    ConvCall,
    ConvOperand,
    copy_of_sequence,
    input_of,
    is_channels_last,
    operand_of,
)
from planner.capture.workspaces.nn.native_convolution import (
    depthwise_gradients,
    forward_products,
    gradients_by_products,
    is_native_depthwise,
    runs_products,
)
from planner.capture.workspaces.ops import Args, Hold, KernelOp, Ops, Output, Outputs, Rule
from planner.capture.workspaces.tensor.reductions import reduction
from planner.program import Convolution, Direction, OpKind, Target

aten = torch.ops.aten


def _forward(args: Args, out: Any, target: Target) -> Ops:
    """Return the ops of `aten::convolution`: copies of operands, the output, and the kernel's workspace.

    Operands that are not in the format of the call are copied: the input before the output is made, the
    weight after it (ATen/native/Convolution.cpp, ATen/native/cudnn/ConvShared.cpp). A transposed convolution
    is run as the data gradient of another convolution.
    """
    call = ConvCall(args[0], args[1], out, args[3], args[4], args[5], args[6], args[8], target)
    x, weight = input_of(call.x), operand_of(call.weight)
    if is_native_depthwise(call):
        return (*x.copies_to(is_last=False), Outputs())
    if runs_products(call):
        return forward_products(call, has_bias=args[2] is not None)
    is_last = is_channels_last(x, weight)
    copies = (*copy_of_sequence(call.x), *x.copies_to(is_last))
    return (*copies, Outputs(), *weight.copies_to(is_last), *_cudnn_ops(call, Direction.FORWARD, is_last))


def _backward(args: Args, out: Any, target: Target) -> Ops:
    """Return the ops of a convolution's backward pass: copies, workspaces and the needed gradients.

    The gradients are of input, weight and bias. The bias gradient is a sum of the output's gradient over all
    dimensions except the channels. The input is copied if the weight gradient is needed and the input is not
    in the format of the forward pass. The output's gradient is copied if it is not in the input's format.
    Source: ATen/native/Convolution.cpp, convolution_backward.
    """
    grad, x, weight, mask = args[0], args[1], args[2], args[10]
    call = ConvCall(x, weight, grad, args[4], args[5], args[6], args[7], args[9], target)
    if runs_products(call):
        return gradients_by_products(call, mask)
    bias: Ops = ()
    if mask[2] and grad.dim() >= 3:
        bias = (Output(), *reduction(grad, [0, *range(2, grad.dim())], 4, target))
    if is_native_depthwise(call):
        return (*depthwise_gradients(operand_of(grad), input_of(x), mask), *bias)
    copies, x_operand, grad_operand = _shared_copies(call, wants_weight=bool(mask[1]))
    gradients: Ops = ()
    if mask[0]:
        gradients += _data_gradient(call, grad_operand)
    if mask[1]:
        gradients += _weight_gradient(call, x_operand, grad_operand)
    return (*copy_of_sequence(x), *copies, *gradients, *released(copies), *bias)


def _shared_copies(call: ConvCall, *, wants_weight: bool) -> tuple[Ops, ConvOperand, ConvOperand]:
    """Return the copies that both gradients share, and the input and the output's gradient after copying."""
    x, grad, weight = input_of(call.x), operand_of(call.y), operand_of(call.weight)
    copies: Ops = ()
    if wants_weight:
        is_last = is_channels_last(x, weight)
        copies += x.copies_to(is_last)
        x = x.contiguous(is_last)
    is_last = x.suggests_last
    if call.transposed:  # `contiguous`
        copies += grad.copies_to(is_last)
        grad = grad.contiguous(is_last)
    elif grad.suggests_last is not is_last:  # `to`, which keeps operands that suggest the format
        copies += (Hold(grad.size_bytes),)
        grad = grad.copied(is_last)
    return copies, x, grad


def _data_gradient(call: ConvCall, grad: ConvOperand) -> Ops:
    """Return the ops of the gradient of a convolution's input: the result, copies and a workspace.

    The copies are of weight and output's gradient.
    """
    weight = operand_of(call.weight)
    is_last = is_channels_last(grad, weight)
    copies = (*weight.copies_to(is_last), *grad.copies_to(is_last))
    return (Output(), *copies, *_cudnn_ops(call, Direction.DATA, is_last), *released(copies))


def _weight_gradient(call: ConvCall, x: ConvOperand, grad: ConvOperand) -> Ops:
    """Return the ops of the gradient of a convolution's weight: copies, the result and a workspace.

    The copies are of the output's gradient and the input. A transposed convolution copies in the opposite
    order.
    """
    is_last = is_channels_last(x, grad)
    copies = tuple(
        op for operand in ((x, grad) if call.transposed else (grad, x)) for op in operand.copies_to(is_last)
    )
    return (*copies, Output(), *_cudnn_ops(call, Direction.WEIGHT, is_last), *released(copies))


# ---- cuDNN's workspaces


def _cudnn_ops(call: ConvCall, direction: Direction, is_last: bool) -> Ops:
    """Return the op of a convolution that cuDNN runs, or () for empty tensors and types that cuDNN lacks."""
    is_empty = any(size == 0 for t in (call.x, call.y, call.weight) for size in t.shape)
    if call.x.dtype not in _DTYPES or is_empty:
        return ()
    return (KernelOp(OpKind.CONVOLUTION, convolution=_query(call, direction, is_last)),)


_TRANSPOSED = {
    Direction.FORWARD: Direction.DATA, Direction.DATA: Direction.FORWARD, Direction.WEIGHT: Direction.WEIGHT,
}  # fmt: skip
_DTYPES = {getattr(torch, name): name for name in ("float32", "float64", "float16", "bfloat16")}


def _query(call: ConvCall, direction: Direction, is_last: bool) -> Convolution:
    """Return the convolution that cuDNN runs for a call, with input and output swapped if transposed."""
    x, y = (call.y, call.x) if call.transposed else (call.x, call.y)
    x_size, weight_size, y_size = (tuple(t.shape) for t in (x, call.weight, y))
    padding, stride, dilation = map(call.of_each_dimension, (call.padding, call.stride, call.dilation))
    if len(padding) == 1:  # Convolution.cpp, view4d
        x_size, weight_size, y_size = ((*size[:2], 1, size[2]) for size in (x_size, weight_size, y_size))
        padding, stride, dilation = (0, *padding), (1, *stride), (1, *dilation)
    return Convolution(
        _TRANSPOSED[direction] if call.transposed else direction, _DTYPES[call.x.dtype], x_size, weight_size,
        y_size, is_last, padding, stride, dilation,
    )  # fmt: skip


RULES: Mapping[str, Rule] = {"convolution": _forward, "convolution_backward": _backward}
