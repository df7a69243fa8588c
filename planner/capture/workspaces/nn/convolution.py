"""Scratch memory of convolutions: what PyTorch itself takes, and what is known of cuDNN's.

What cuDNN takes depends on which of its engines its heuristics choose. Where a library is at hand it is asked
(`Target.conv_workspace_query`). Else published runs fix one term, `ImageWise`; all else is taken to be none,
and convolutions stay among the unknown operators of the answer. Depthwise convolutions that PyTorch runs with
kernels of its own take nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from planner.capture.workspaces.formats import (
    Laid,
    copy_of_sequence,
    copy_to,
    in_format,
    is_last_of,
    laid,
    laid_input,
)
from planner.capture.workspaces.steps import Held, Made, Rule, Search, Step, Trial, released, tensor_bytes
from planner.capture.workspaces.tensor.reductions import reduction
from planner.program import Convolution, ConvWorkspace, Direction, Target

aten = torch.ops.aten

MIB = 2**20


@dataclass(frozen=True, slots=True)
class ImageWise:
    """Weight gradients taken image by image and added up: a workspace of batch size times weights.

    Of pointwise convolutions in fp32 whose weights have so many bytes and whose output so few positions that
    a product over one image is cheap beside its result; where the workspace would be larger than a limit,
    cuDNN goes another way, and so does PyTorch where the memory for it is refused (Conv_v8.cpp).
    """

    least_weight_bytes: int
    most_positions: int
    limit_bytes: int

    def workspace_bytes(self, batch: int, weight_bytes: int, positions: int) -> int:
        """The workspace; 0 where the term does not apply.

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
# between which values each may lie; on an RTX 4060 the same layers take nothing. Of other GPUs nothing tells.
IMAGE_WISE: Mapping[tuple[int, int], ImageWise] = {(8, 6): ImageWise(MIB, 9, 512 * MIB)}


def _forward(args: tuple[Any, ...], out: Any, chip: Target) -> tuple[Step, ...]:
    """aten::convolution: the forward pass, which for a transposed one is another's data gradient.

    Operands that are not in the format of the call are copied: the input before the output is made, the
    weight after it (ATen/native/Convolution.cpp, ATen/native/cudnn/ConvShared.cpp).
    """
    shape = _Shape(args[3], args[4], args[5], args[6], args[8])
    x, weight = laid_input(args[0]), laid(args[1])
    if _is_native(args[0], args[1], shape):
        return (*copy_to(x, is_last=False), Made.REST)
    is_last = is_last_of(x, weight)
    given = copy_of_sequence(args[0])
    direction = Direction.DATA if shape.transposed else Direction.FORWARD
    first, last = (out, args[0]) if shape.transposed else (args[0], out)
    runs = _engine(direction, first, args[1], last, shape, is_last, chip)
    return (*given, *copy_to(x, is_last), Made.REST, *copy_to(weight, is_last), *runs)


def _backward(args: tuple[Any, ...], out: Any, chip: Target) -> tuple[Step, ...]:
    """aten::convolution_backward: data gradient, weight gradient, then the bias gradient, a sum of the
    output's gradient over all but the channels (ATen/native/Convolution.cpp, convolution_backward).

    The input is copied where it is not in the format of the forward pass and the weight gradient is wanted,
    the output's gradient where it is not in that of the input.
    """
    grad, x, weight, mask = args[0], args[1], args[2], args[10]
    shape = _Shape(args[4], args[5], args[6], args[7], args[9])
    call = _Backward(grad, x, weight, shape, chip)
    bias: tuple[Step, ...] = ()
    if mask[2] and grad.dim() >= 3:
        bias = (Made.OUTPUT, *reduction(grad, [0, *range(2, grad.dim())], 4, chip))
    if _is_native(x, weight, shape):
        return (*_native_gradients(laid(grad), laid_input(x), mask), *bias)
    given = copy_of_sequence(x)
    shared, ours, theirs = _shared_copies(call, wants_weight=bool(mask[1]))
    steps: tuple[Step, ...] = ()
    if mask[0]:
        steps += _data_gradient(call, theirs)
    if mask[1]:
        steps += _weight_gradient(call, ours, theirs)
    return (*given, *shared, *steps, *released(shared), *bias)


@dataclass(frozen=True, slots=True)
class _Backward:
    """A call of the backward pass."""

    grad: Tensor
    x: Tensor
    weight: Tensor
    shape: "_Shape"
    chip: Target


def _shared_copies(call: _Backward, *, wants_weight: bool) -> tuple[tuple[Step, ...], "Laid", "Laid"]:
    """Return the copies that both gradients share, and input and output's gradient as they lie then."""
    x, grad, weight = laid_input(call.x), laid(call.grad), laid(call.weight)
    steps: tuple[Step, ...] = ()
    if wants_weight:
        is_last = is_last_of(x, weight)
        steps += copy_to(x, is_last)
        x = in_format(x, is_last)
    wanted = x.suggests_last
    if call.shape.transposed:  # `contiguous`
        steps += copy_to(grad, wanted)
        grad = in_format(grad, wanted)
    elif grad.suggests_last is not wanted:  # `to`, which leaves what suggests the format as it is
        steps += (Held(grad.size_bytes),)
        grad = grad.copied(wanted)
    return steps, x, grad


def _data_gradient(call: _Backward, grad: "Laid") -> tuple[Step, ...]:
    """The result first, then copies of weight and output's gradient."""
    weight = laid(call.weight)
    is_last = is_last_of(grad, weight)
    held = (*copy_to(weight, is_last), *copy_to(grad, is_last))
    direction = Direction.FORWARD if call.shape.transposed else Direction.DATA
    x, y = (call.grad, call.x) if call.shape.transposed else (call.x, call.grad)
    runs = _engine(direction, x, call.weight, y, call.shape, is_last, call.chip)
    return (Made.OUTPUT, *held, *runs, *released(held))


def _weight_gradient(call: _Backward, x: "Laid", grad: "Laid") -> tuple[Step, ...]:
    """Copies of what stands for the output's gradient and the input first, then the result."""
    is_last = is_last_of(x, grad)
    pair = (x, grad) if call.shape.transposed else (grad, x)
    held = tuple(step for operand in pair for step in copy_to(operand, is_last))
    if call.chip.conv_workspace_query is None:
        runs = _image_wise(call)
    else:
        first, last = (call.grad, call.x) if call.shape.transposed else (call.x, call.grad)
        runs = _engine(Direction.WEIGHT, first, call.weight, last, call.shape, is_last, call.chip)
    return (*held, Made.OUTPUT, *runs, *released(held))


def _image_wise(call: _Backward) -> tuple[Step, ...]:
    """The term that published runs tell of, where no library is asked."""
    grad, weight, shape = call.grad, call.weight, call.shape
    term = IMAGE_WISE.get(call.chip.capability)
    pointwise = weight.dim() == 4 and tuple(weight.shape[2:]) == (1, 1)
    if term is None or not pointwise or shape.groups != 1 or shape.transposed:
        return ()
    if weight.dtype is not torch.float32 or not grad.is_contiguous():
        return ()
    positions = grad.shape[2] * grad.shape[3]
    size_bytes = term.workspace_bytes(grad.shape[0], tensor_bytes(weight), positions)
    if not size_bytes:
        return ()

    def why(block: int) -> ConvWorkspace:
        seen = _seen(Direction.WEIGHT, call.x, weight, grad, shape, is_last=False)
        return ConvWorkspace.from_query(block, seen, None, searched=False)

    return (Trial(size_bytes, why),)


def _native_gradients(grad: "Laid", x: "Laid", mask: Sequence[bool]) -> tuple[Step, ...]:
    """PyTorch's own kernels of depthwise convolutions: that of images makes the weight gradient first, that
    of volumes makes both before it copies, and keeps the copy of the output's gradient.

    The order of arguments decides in ATen/native/cuda/DepthwiseConv2d.cu; DepthwiseConv3d.cu makes results
    one by one.
    """
    copy, held = copy_to(grad, is_last=False), copy_to(x, is_last=False) if mask[1] else ()
    if len(grad.shape) == 5:
        return (*(Made.OUTPUT for wanted in mask[:2] if wanted), *copy, *held, *released(held))
    steps: tuple[Step, ...] = ()
    if mask[1]:
        steps += (*held, Made.SECOND if mask[0] else Made.OUTPUT, *released(held))
    if mask[0]:
        steps += (Made.OUTPUT,)
    return (*copy, *steps, *released(copy))


@dataclass(frozen=True, slots=True)
class _Shape:
    """Arguments that both passes have."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    groups: int


def _engine(
    direction: Direction,
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    shape: _Shape,
    is_last: bool,
    chip: Target,
) -> tuple[Step, ...]:
    """What the library, where one is asked, says that it takes."""
    if (
        chip.conv_workspace_query is None
        or x.dtype not in _DTYPES
        or 0 in x.shape
        or 0 in y.shape
        or 0 in weight.shape
    ):
        return ()
    asked = _seen(direction, x, weight, y, shape, is_last)
    said = chip.conv_workspace_query(chip.capability, chip.sm_count, asked)
    steps: tuple[Step, ...] = ()
    if said.searched_bytes:
        largest = partial(ConvWorkspace.from_query, query=asked, engine=said.searched, searched=True)
        steps += (Search(said.searched_bytes, largest),)
    if said.workspace_bytes:
        runs = partial(ConvWorkspace.from_query, query=asked, engine=said.engine, searched=False)
        steps += (Trial(said.workspace_bytes, runs),)
    return steps


def _seen(
    direction: Direction, x: Tensor, weight: Tensor, y: Tensor, shape: _Shape, is_last: bool
) -> Convolution:
    """The call as cuDNN sees it."""
    sizes = [tuple(int(size) for size in t.shape) for t in (x, weight, y)]
    padding, stride, dilation = tuple(shape.padding), tuple(shape.stride), tuple(shape.dilation)
    if len(padding) == 1:  # Convolution.cpp, view4d
        sizes = [(*size[:2], 1, size[2]) for size in sizes]
        padding, stride, dilation = (0, *padding), (1, *stride), (1, *dilation)
    return Convolution(
        direction, _DTYPES[x.dtype], sizes[0], sizes[1], sizes[2], is_last, padding, stride, dilation
    )


def _is_native(x: Tensor, weight: Tensor, shape: _Shape) -> bool:
    """Whether PyTorch runs a contiguous depthwise convolution itself: it does but for half precision where
    cuDNN is known to be good (Convolution.cpp, use_cudnn_depthwise and the workloads that it lists).
    """
    if shape.transposed or shape.groups <= 1 or x.shape[1] != shape.groups:
        return False
    if is_last_of(laid_input(x), laid(weight)):
        return False
    if x.dtype is not torch.float16 or x.dim() == 5 or any(step != 1 for step in shape.dilation):
        return True
    batch, channels, height, width = laid_input(x).shape
    step, kernel = shape.stride[-1], weight.shape[-1]
    if channels < 32 or (shape.stride[0] != step and height != 1):
        return True
    if height == 1 and step == 1:
        return False
    if laid(weight).shape[2] != kernel or kernel not in (1, 3, 5) or width < 7 or step not in (1, 2):
        return True
    if step == 1:
        return False
    if batch == 1:
        return kernel == 1 and width > 28
    if kernel == 1:
        return not (batch <= 16 and channels >= 128 and width <= 7)
    return not (channels >= 512 or (channels >= 256 and width >= 28))


_DTYPES = {
    torch.float32: "float32", torch.float64: "float64", torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}  # fmt: skip
RULES: Mapping[Any, Rule] = {
    aten.convolution.default: _forward,
    aten.convolution_backward.default: _backward,
}
# As far as no library was asked.
UNKNOWN = frozenset({aten.convolution.default, aten.convolution_backward.default})
