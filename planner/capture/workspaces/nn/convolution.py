"""Workspaces of convolutions: PyTorch's own, and cuDNN's as far as they are known.

cuDNN's workspace depends on which of its engines its heuristics choose. Where a library is queried
(`Target.conv_workspace_query`), it answers for each call. Otherwise published runs fix one term, `ImageWise`;
all else counts as empty, and convolutions stay among the unknown operators of the answer. Kernels of
PyTorch's own are those of `native_convolution`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from planner.capture.operator_table import operator_table
from planner.capture.workspaces._rule import released, tensor_bytes
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
from planner.capture.workspaces.ops import Args, AutotuneAlloc, Hold, Op, Ops, Output, Outputs, Rule, TryAlloc
from planner.capture.workspaces.tensor.reductions import reduction
from planner.program import Convolution, ConvWorkspace, Direction, Target

aten = torch.ops.aten

MIB = 2**20


@dataclass(frozen=True, slots=True)
class ImageWise:
    """Weight gradients taken image by image and added up: a workspace of batch size times weights.

    It concerns pointwise convolutions in fp32 whose weights have so many bytes and whose output so few
    positions that a product over one image is cheap beside its result. Above a limit cuDNN takes another
    engine, as does PyTorch where the allocation fails (Conv_v8.cpp).
    """

    least_weight_bytes: int
    most_positions: int
    limit_bytes: int

    def workspace_bytes(self, batch: int, weight_bytes: int, positions: int) -> int:
        """Return the workspace; 0 where the term does not apply.

        >>> ImageWise(2**20, 9, 2**29).workspace_bytes(323, 1280 * 320 * 4, 9) / 2**20
        504.6875
        >>> ImageWise(2**20, 9, 2**29).workspace_bytes(377, 1280 * 320 * 4, 9)
        0
        """
        if weight_bytes < self.least_weight_bytes or positions > self.most_positions:
            return 0
        size_bytes = batch * weight_bytes
        return size_bytes if size_bytes <= self.limit_bytes else 0


# By benchmarks/fits/convolution_workspaces.py, which fits them to published peaks of an RTX 3060 and prints
# between which values each may lie; on an RTX 4060 the same layers take nothing. Other GPUs are not known.
IMAGE_WISE: Mapping[tuple[int, int], ImageWise] = {(8, 6): ImageWise(MIB, 9, 512 * MIB)}


def _forward(args: Args, out: Any, target: Target) -> Ops:
    """Run aten::convolution, which for a transposed one is the data gradient of another.

    Operands that are not in the format of the call are copied: the input before the output is made, the
    weight after it (ATen/native/Convolution.cpp, ATen/native/cudnn/ConvShared.cpp).
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
    """Make the gradients of input, weight and bias (ATen/native/Convolution.cpp, convolution_backward).

    That of the bias is a sum of the output's gradient over all but the channels. The input is copied where it
    is not in the format of the forward pass and the weight gradient is needed, the output's gradient where it
    is not in that of the input.
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
    """Return the copies that both gradients share, and the input and the output's gradient after them."""
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
    """Make the result first, then copies of weight and output's gradient."""
    weight = operand_of(call.weight)
    is_last = is_channels_last(grad, weight)
    copies = (*weight.copies_to(is_last), *grad.copies_to(is_last))
    return (Output(), *copies, *_cudnn_ops(call, Direction.DATA, is_last), *released(copies))


def _weight_gradient(call: ConvCall, x: ConvOperand, grad: ConvOperand) -> Ops:
    """Copy the output's gradient and the input, then make the result.

    A transposed convolution copies in the opposite order.
    """
    is_last = is_channels_last(x, grad)
    copies = tuple(
        op for operand in ((x, grad) if call.transposed else (grad, x)) for op in operand.copies_to(is_last)
    )
    runs = (
        _image_wise(call)
        if call.target.conv_workspace_query is None
        else _cudnn_ops(call, Direction.WEIGHT, is_last)
    )
    return (*copies, Output(), *runs, *released(copies))


# ---- cuDNN's workspaces


def _image_wise(call: ConvCall) -> Ops:
    """Allocate the term that published runs show, where no library is queried."""
    grad, weight = call.y, call.weight
    term = IMAGE_WISE.get(call.target.capability)
    pointwise = weight.dim() == 4 and tuple(weight.shape[2:]) == (1, 1)
    if term is None or not pointwise or call.groups != 1 or call.transposed:
        return ()
    if weight.dtype is not torch.float32 or not grad.is_contiguous():
        return ()
    positions = grad.shape[2] * grad.shape[3]
    size_bytes = term.workspace_bytes(grad.shape[0], tensor_bytes(weight), positions)
    if not size_bytes:
        return ()

    def explain(block: int) -> ConvWorkspace:
        return ConvWorkspace.from_query(
            block, _query(call, Direction.WEIGHT, is_last=False), None, searched=False
        )

    return (TryAlloc(size_bytes, explain),)


def _cudnn_ops(call: ConvCall, direction: Direction, is_last: bool) -> Ops:
    """Return the allocations that cuDNN, where it is queried, answers for a pass."""
    is_empty = any(0 in t.shape for t in (call.x, call.y, call.weight))
    if call.target.conv_workspace_query is None or call.x.dtype not in _DTYPES or is_empty:
        return ()
    query = _query(call, direction, is_last)
    answer = call.target.conv_workspace_query(call.target.capability, call.target.sm_count, query)
    ops: list[Op] = []
    if answer.searched_bytes:
        explain = partial(ConvWorkspace.from_query, query=query, engine=answer.searched, searched=True)
        ops.append(AutotuneAlloc(answer.searched_bytes, explain))
    if answer.workspace_bytes:
        explain = partial(ConvWorkspace.from_query, query=query, engine=answer.engine, searched=False)
        ops.append(TryAlloc(answer.workspace_bytes, explain))
    return tuple(ops)


_TRANSPOSED = {
    Direction.FORWARD: Direction.DATA, Direction.DATA: Direction.FORWARD, Direction.WEIGHT: Direction.WEIGHT,
}  # fmt: skip
_DTYPES = {getattr(torch, name): name for name in ("float32", "float64", "float16", "bfloat16")}


def _query(call: ConvCall, direction: Direction, is_last: bool) -> Convolution:
    """Return the call as cuDNN sees it: a transposed convolution is another one from output to input."""
    x, y = (call.y, call.x) if call.transposed else (call.x, call.y)
    x_size, weight_size, y_size = (tuple(int(size) for size in t.shape) for t in (x, call.weight, y))
    padding, stride, dilation = tuple(call.padding), tuple(call.stride), tuple(call.dilation)
    if len(padding) == 1:  # Convolution.cpp, view4d
        x_size, weight_size, y_size = ((*size[:2], 1, size[2]) for size in (x_size, weight_size, y_size))
        padding, stride, dilation = (0, *padding), (1, *stride), (1, *dilation)
    return Convolution(
        _TRANSPOSED[direction] if call.transposed else direction, _DTYPES[call.x.dtype], x_size, weight_size,
        y_size, is_last, padding, stride, dilation,
    )  # fmt: skip


RULES: Mapping[str, Rule] = {"convolution": _forward, "convolution_backward": _backward}
CUDNN_OPS = frozenset(operator_table(RULES))  # unknown unless a cuDNN library is queried
