"""Workspace rules of fake quantization with learned scales and zero points.

Source: ATen/native/quantized/FakeQuantPerTensorAffine.cpp and FakeQuantPerChannelAffine.cpp.
"""

from typing import Any

from torch import Tensor

from planner.capture.workspaces._rule import released, tensor_bytes
from planner.capture.workspaces.ops import Args, Hold, Ops, Output, Outputs, Release, ReleaseBeneath, Rule
from planner.capture.workspaces.tensor.reductions import reduction
from planner.program import Target

_UNIT = 4  # bytes of a float or an int32
_EXTENT = (Hold(_UNIT), Hold(_UNIT), Release(2))  # the least and the greatest zero point, which are checked


def _per_tensor(args: Args, out: Tensor, target: Target) -> Ops:
    """Return the ops of one scale for a tensor: the output, then a mask of elements in range."""
    return (Outputs(), out.numel())


def _per_channel(args: Args, out: Tensor, target: Target) -> Ops:
    """Return the ops of a scale for each channel: rounded zero points as int32, the output, and a mask."""
    zero_points = args[2]
    integers = Hold(_UNIT * zero_points.numel())
    rounded = (Hold(tensor_bytes(zero_points)), integers, ReleaseBeneath(1))
    return (*rounded, *_EXTENT, Outputs(), out.numel())


def _gradient_per_tensor(args: Args, out: Any, target: Target) -> Ops:
    return _gradients(out, None, target)


def _gradient_per_channel(args: Args, out: Any, target: Target) -> Ops:
    others = [dim for dim in range(args[1].dim()) if dim != args[4] % args[1].dim()]
    return (Hold(tensor_bytes(args[3])), *_EXTENT, *_gradients(out, others, target))


def _gradients(out: tuple[Tensor, ...], dims: list[int] | None, target: Target) -> Ops:
    """Return the ops of three gradients: of each element, and of scale and zero point, summed over `dims`.

    Gradients of scale and zero point are made for each element first.
    """
    x = out[0]
    each = Hold(tensor_bytes(x))
    sums = reduction(x, dims, _UNIT, target) if dims != [] else ()
    return (Output(), each, each, Output(), *sums, *released(sums), Output(), *sums)


RULES: dict[str, Rule] = {
    "_fake_quantize_learnable_per_tensor_affine": _per_tensor,
    "_fake_quantize_learnable_per_channel_affine": _per_channel,
    "_fake_quantize_learnable_per_tensor_affine_backward": _gradient_per_tensor,
    "_fake_quantize_learnable_per_channel_affine_backward": _gradient_per_channel,
}
