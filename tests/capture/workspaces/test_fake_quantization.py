"""Workspaces of fake quantization with learned scales and zero points."""

from planner.capture.workspaces.ops import Hold, Release, ReleaseBeneath
from tests.helpers.workspaces import OUTPUT, REST, aten, meta, steps

X = (256, 32, 32, 32)
EACH = Hold(4 * 256 * 32**3)
EXTENT = Hold(4), Hold(4), Release(2)


def test_scales_of_tensors() -> None:
    """A mask beside the result; gradients of each element, whose sums are split over the GPU."""
    one = meta(1)
    func = aten._fake_quantize_learnable_per_tensor_affine
    assert steps(func.default, meta(*X), one, one, 0, 255, 1.0, out=meta(*X)) == (REST, 256 * 32**3)
    func = aten._fake_quantize_learnable_per_tensor_affine_backward
    sums = Hold(4 * 252), Hold(4)
    ops = steps(func.default, meta(*X), meta(*X), one, one, 0, 255, 1.0, out=(meta(*X), one, one))
    assert ops == (OUTPUT, EACH, EACH, OUTPUT, *sums, Release(2), OUTPUT, *sums)


def test_scales_of_channels() -> None:
    """Zero points are rounded and checked at first."""
    channels = meta(32)
    func = aten._fake_quantize_learnable_per_channel_affine
    ops = steps(func.default, meta(*X), channels, channels, 1, 0, 255, 1.0, out=meta(*X))
    assert ops == (Hold(128), Hold(128), ReleaseBeneath(1), *EXTENT, REST, 256 * 32**3)
    func = aten._fake_quantize_learnable_per_channel_affine_backward
    out = meta(*X), channels, channels
    ops = steps(func.default, meta(*X), meta(*X), channels, channels, 1, 0, 255, 1.0, out=out)
    sums = ops[8:10]
    assert ops == (
        Hold(128), *EXTENT, OUTPUT, EACH, EACH, OUTPUT, *sums, Release(2), OUTPUT, *sums,
    )  # fmt: skip
