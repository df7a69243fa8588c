"""Layouts of convolutions and of their gradients, with the formats that CUDA chooses."""

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from torch import Tensor

from planner.capture.meta_kernels.run import meta_kernels
from tests.helpers.meta_kernels import agrees, aten, image, meta, ours, torchs


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[Any, ...]:
    """Arguments of a convolution over contiguous tensors, most of which fit together."""
    spatial = draw(st.integers(1, 3))
    transposed = draw(st.booleans())
    groups = draw(st.integers(1, 3))
    per_group = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    channels = per_group[0] * groups + (draw(st.integers(0, 9)) == 0)
    kernel = [draw(st.integers(1, 3)) for _ in range(spatial)]
    outer = (per_group[0] * groups, per_group[1]) if transposed else (per_group[1] * groups, per_group[0])
    weight = meta(*outer, *kernel)
    x = meta(draw(st.integers(1, 3)), channels, *(draw(st.integers(1, 7)) for _ in range(spatial)))
    bias = draw(st.sampled_from((None, meta(per_group[1] * groups))))

    def each(low: int, high: int) -> list[int]:
        return [draw(st.integers(low, high)) for _ in range(spatial)]

    extra = each(0, 1) if transposed else [0] * spatial
    padding = each(0, 2)[: draw(st.sampled_from((1, 3)))]  # one for all dimensions, as "valid" leaves
    return x, weight, bias, each(1, 3), padding, each(1, 2), transposed, extra, groups


@settings(max_examples=500)
@given(args=convolutions())
def test_convolution_of_contiguous_inputs(args: tuple[Any, ...]) -> None:
    """A convolution of contiguous tensors is as in torch; where torch raises, the shortcut stays silent."""
    answer = ours(aten.convolution.default, *args)
    assert answer in (NotImplemented, torchs(aten.convolution.default, *args))


@settings(max_examples=300)
@given(args=convolutions(), mask=st.tuples(st.booleans(), st.booleans(), st.booleans()))
def test_convolution_backward_of_contiguous_inputs(args: tuple[Any, ...], mask: tuple[bool, ...]) -> None:
    """The gradients of a convolution of contiguous tensors are as in torch."""
    x, weight, _, *rest = args
    out = ours(aten.convolution.default, *args)
    assume(out is not NotImplemented)
    agrees(aten.convolution_backward.default, meta(*out[0]), x, weight, [out[0][1]], *rest, list(mask))


CONV = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)


@pytest.mark.parametrize(
    ("x", "weight", "strides"),
    [
        (image(2, 3, 6, 5), meta(4, 3, 1, 1), (120, 1, 20, 4)),  # the input decides
        (meta(2, 3, 6, 5), image(4, 3, 1, 1), (120, 1, 20, 4)),  # or the weight
        (meta(2, 3, 6, 5), meta(4, 3, 1, 1), (120, 30, 5, 1)),
        (meta(2, 6, 5, 3).permute(0, 3, 1, 2), meta(4, 3, 1, 1), (120, 1, 20, 4)),
        (meta(2, 6, 6, 5)[:, :3], meta(4, 3, 1, 1), (120, 30, 5, 1)),  # a slice is copied
        (meta(2, 3, 5, 6).transpose(2, 3), meta(4, 3, 1, 1), (120, 30, 5, 1)),
    ],
)
def test_convolution_of_other_layouts(x: Tensor, weight: Tensor, strides: tuple[int, ...]) -> None:
    """cuDNN's convolution answers channels last if the input or the weight is, and contiguous otherwise."""
    assert ours(aten.convolution.default, x, weight, None, *CONV) == (
        (2, 4, 6, 5), strides, torch.float32, 960,
    )  # fmt: skip


def test_convolution_formats() -> None:
    """Three dimensions have a format of their own, double precision and one dimension have none."""
    volume = meta(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d)
    cube = ([1] * 3, [0] * 3, [1] * 3, False, [0] * 3, 1)
    assert ours(aten.convolution.default, volume, meta(1, 3, 1, 1, 1), None, *cube) == (
        (2, 1, 4, 5, 6), (120, 1, 30, 6, 1), torch.float32, 960,
    )  # fmt: skip
    doubles = image(2, 3, 6, 5, dtype=torch.float64), meta(4, 3, 1, 1, dtype=torch.float64)
    assert ours(aten.convolution.default, *doubles, None, *CONV) == (
        (2, 4, 6, 5), (120, 30, 5, 1), torch.float64, 1920,
    )  # fmt: skip
    line = ([1], [0], [1], False, [0], 1)
    assert ours(aten.convolution.default, meta(2, 5, 3).transpose(1, 2), meta(4, 3, 1), None, *line) == (
        (2, 4, 5), (20, 5, 1), torch.float32, 160,
    )  # fmt: skip


def test_convolution_backward_of_other_layouts() -> None:
    """Both gradients have the format of the input or the weight, whatever that of the outer gradient."""
    for grad in (meta(2, 4, 6, 5), image(2, 4, 6, 5)):
        assert ours(
            aten.convolution_backward.default,
            grad, image(2, 3, 6, 5), meta(4, 3, 1, 1), [4], *CONV, [True] * 3,
        ) == (
            ((2, 3, 6, 5), (90, 1, 15, 3), torch.float32, 720),
            ((4, 3, 1, 1), (3, 1, 3, 3), torch.float32, 48),
            ((4,), (1,), torch.float32, 16),
        )  # fmt: skip
        assert ours(
            aten.convolution_backward.default,
            grad, meta(2, 3, 6, 5), meta(4, 3, 1, 1), [4], *CONV, [True] * 3,
        ) == (
            ((2, 3, 6, 5), (90, 30, 5, 1), torch.float32, 720),
            ((4, 3, 1, 1), (3, 1, 1, 1), torch.float32, 48),
            ((4,), (1,), torch.float32, 16),
        )  # fmt: skip


@pytest.mark.parametrize(
    "args",
    [
        (meta(2, 3, 6, 5), meta(4, 2, 1, 1), None, *CONV),  # channels
        (meta(2, 3, 1, 1), meta(4, 3, 3, 3), None, *CONV),  # the kernel is larger than the image
        (meta(2, 3, 6, 5), meta(4, 3, 1), None, *CONV),  # ranks
        (meta(2, 3, 6, 5), meta(4, 3, 1, 1, dtype=torch.float16), None, *CONV),  # dtypes
        (meta(2, 3, 6, 5), meta(4, 3, 1, 1), meta(3), *CONV),  # bias
        (meta(0, 3, 6, 5), meta(4, 3, 1, 1), None, *CONV),
        (torch.empty(2, 3, 6, 5), torch.empty(4, 3, 1, 1), None, *CONV),
    ],
)
def test_convolution_leaves_errors_to_torch(args: tuple[Any, ...]) -> None:
    """A convolution of tensors that do not fit together is torch's own to judge."""
    assert ours(aten.convolution.default, *args) is NotImplemented


def test_the_smaller_output_of_a_transposed_volume_keeps_the_inputs_storage() -> None:
    """In bfloat16 on a T4 it is resized: 2 x 64 x 8 x 8 x 8 numbers of two bytes, of which 4 channels are
    used, as an allocator recorded it with torch 2.13 on an emulated GPU. On later GPUs cuDNN runs.
    """
    x, weight = (meta(*sizes, dtype=torch.bfloat16) for sizes in ((2, 64, 8, 8, 8), (64, 4, 1, 1, 1)))
    args = (x, weight, None, [1] * 3, [0] * 3, [1] * 3, True, [0] * 3, 1)
    for capability, size_bytes in (((7, 5), 131_072), ((8, 0), 8_192)):
        out = meta_kernels(capability)[aten.convolution.default](*args)
        assert (out.shape, out.untyped_storage().nbytes()) == ((2, 4, 8, 8, 8), size_bytes)
