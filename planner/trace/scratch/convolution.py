"""Scratch memory of convolutions: what PyTorch itself takes, and what is known of cuDNN's.

What cuDNN takes depends on which of its engines its heuristics choose. Where a library is at hand it is asked
(`Chip.cudnn`). Else published runs fix one term, `ImageWise`; all else is taken to be nothing, and
convolutions stay among the unknown operators of the answer. Depthwise convolutions that PyTorch runs with
kernels of its own take nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from planner.chip import Chip
from planner.convolutions import Asked, Convolution, Direction, row_of
from planner.trace.scratch.reductions import reduction
from planner.trace.scratch.steps import Made, Rule, Search, Step, Trial, tensor_bytes
from planner.trace.strides import suggests_channels_last

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


# By benchmarks/convolution_workspaces.py, which fits them to published peaks of an RTX 3060 and prints
# between which values each may lie; on an RTX 4060 the same layers take nothing. Of other GPUs nothing tells.
IMAGE_WISE: Mapping[tuple[int, int], ImageWise] = {(8, 6): ImageWise(MIB, 9, 512 * MIB)}


def _forward(args: tuple[Any, ...], out: Any, chip: Chip) -> tuple[Step, ...]:
    """aten::convolution: the forward pass, which for a transposed one is another's data gradient."""
    if chip.cudnn is None:
        return ()
    x, weight = args[0], args[1]
    shape = _Shape(args[3], args[4], args[5], args[6], args[8])
    if shape.transposed:
        return _asked(Direction.DATA, out, weight, x, shape, chip)
    return _asked(Direction.FORWARD, x, weight, out, shape, chip)


def _backward(args: tuple[Any, ...], out: Any, chip: Chip) -> tuple[Step, ...]:
    """aten::convolution_backward: data gradient, weight gradient, then the bias gradient, a sum of the
    output's gradient over all but the channels (ATen/native/Convolution.cpp, convolution_backward).
    """
    grad, x, weight, mask = args[0], args[1], args[2], args[10]
    shape = _Shape(args[4], args[5], args[6], args[7], args[9])
    steps: tuple[Step, ...] = ()
    if mask[0]:
        steps += (Made.OUTPUT, *_data_gradient(x, weight, grad, shape, chip))
    if mask[1]:
        steps += (Made.OUTPUT, *_weight_gradient(x, weight, grad, shape, chip))
    if mask[2] and grad.dim() >= 3:
        steps += (Made.OUTPUT, *reduction(grad, [0, *range(2, grad.dim())], 4, chip))
    return steps


def _data_gradient(x: Tensor, weight: Tensor, grad: Tensor, shape: "_Shape", chip: Chip) -> tuple[Step, ...]:
    if chip.cudnn is None:
        return ()
    if shape.transposed:
        return _asked(Direction.FORWARD, grad, weight, x, shape, chip)
    return _asked(Direction.DATA, x, weight, grad, shape, chip)


def _weight_gradient(
    x: Tensor, weight: Tensor, grad: Tensor, shape: "_Shape", chip: Chip
) -> tuple[Step, ...]:
    if chip.cudnn is not None:
        first, last = (grad, x) if shape.transposed else (x, grad)
        return _asked(Direction.WEIGHT, first, weight, last, shape, chip)
    term = IMAGE_WISE.get(chip.capability)
    pointwise = weight.dim() == 4 and tuple(weight.shape[2:]) == (1, 1)
    if term is None or not pointwise or shape.groups != 1 or shape.transposed:
        return ()
    if weight.dtype is not torch.float32 or not grad.is_contiguous():
        return ()
    positions = grad.shape[2] * grad.shape[3]
    size_bytes = term.workspace_bytes(grad.shape[0], tensor_bytes(weight), positions)
    if not size_bytes:
        return ()

    def why(block: int) -> Asked:
        return row_of(block, _seen(Direction.WEIGHT, x, weight, grad, shape), None, searched=False)

    return (Trial(size_bytes, why),)


@dataclass(frozen=True, slots=True)
class _Shape:
    """Arguments that both passes have."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    groups: int


def _asked(
    direction: Direction, x: Tensor, weight: Tensor, y: Tensor, shape: _Shape, chip: Chip
) -> tuple[Step, ...]:
    """What the library says that it takes."""
    assert chip.cudnn is not None
    asked = _as_cudnn_sees(direction, x, weight, y, shape)
    if asked is None:
        return ()
    said = chip.cudnn(chip.capability, chip.multiprocessors, asked)
    steps: tuple[Step, ...] = ()
    if said.searched_bytes:
        largest = partial(row_of, asked=asked, engine=said.searched, searched=True)
        steps += (Search(said.searched_bytes, largest),)
    if said.workspace_bytes:
        runs = partial(row_of, asked=asked, engine=said.engine, searched=False)
        steps += (Trial(said.workspace_bytes, runs),)
    return steps


def _as_cudnn_sees(
    direction: Direction, x: Tensor, weight: Tensor, y: Tensor, shape: _Shape
) -> Convolution | None:
    """The call; None where PyTorch runs a kernel of its own, or none at all."""
    if x.dtype not in _DTYPES or 0 in x.shape or 0 in y.shape or 0 in weight.shape:
        return None
    seen = _seen(direction, x, weight, y, shape)
    depthwise = not shape.transposed and shape.groups > 1 and seen.x[1] == shape.groups
    return None if depthwise and not seen.channels_last and _runs_natively(seen) else seen


def _seen(direction: Direction, x: Tensor, weight: Tensor, y: Tensor, shape: _Shape) -> Convolution:
    """The same of one that cuDNN runs."""
    read = y if direction is Direction.DATA else x
    is_last = suggests_channels_last(read) or suggests_channels_last(weight)
    last = is_last and x.dtype is not torch.float64  # ConvUtils.h, cudnn_conv_suggest_memory_format
    sizes = [tuple(int(size) for size in t.shape) for t in (x, weight, y)]
    padding, stride, dilation = tuple(shape.padding), tuple(shape.stride), tuple(shape.dilation)
    if len(padding) == 1:  # Convolution.cpp, view4d
        sizes = [(*size[:2], 1, size[2]) for size in sizes]
        padding, stride, dilation = (0, *padding), (1, *stride), (1, *dilation)
    return Convolution(
        direction, _DTYPES[x.dtype], sizes[0], sizes[1], sizes[2], last, padding, stride, dilation
    )


def _runs_natively(seen: Convolution) -> bool:
    """Whether PyTorch runs a contiguous depthwise convolution itself: it does but for half precision where
    cuDNN is known to be good (Convolution.cpp, use_cudnn_depthwise and the workloads that it lists).
    """
    if seen.dtype != "float16" or len(seen.x) != 4 or any(step != 1 for step in seen.dilation):
        return True
    batch, channels, height, width = seen.x
    step, kernel = seen.stride[1], seen.w[3]
    if channels < 32 or (seen.stride[0] != step and height != 1):
        return True
    if height == 1 and step == 1:
        return False
    if seen.w[2] != kernel or kernel not in (1, 3, 5) or width < 7 or step not in (1, 2):
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
