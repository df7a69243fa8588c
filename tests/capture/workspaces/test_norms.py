"""Workspaces and copies of norms, softmax and resampling."""

import pytest
import torch
from torch import Tensor

from planner.capture.workspaces.ops import Hold, Op, Output, Release, ReleaseBeneath
from planner.capture.workspaces.registry import rule_of
from planner.program.target import Target
from tests.helpers.workspaces import OUTPUT, REST, X_BYTES, X, aten, crossed, index, last, meta, steps


def test_the_second_output_comes_first() -> None:
    """The mask of dropout before its result, the total weight of nll_loss2d before the loss."""
    assert steps(aten.native_dropout.default, meta(2, 3), 0.1, True) == (Output(1), OUTPUT)
    args = (meta(2, 5, 8, 8), index(2, 8, 8), None, 1, -100)
    assert steps(aten.nll_loss2d_forward.default, *args) == (Output(1), OUTPUT)


def test_upsampling_copies_a_gradient_beside_its_result() -> None:
    """A slice of channels, as `cat` gives back; either format is read as it is."""
    size = ([32, 32], [4, 8, 16, 16], 2.0, 2.0)
    part = meta(4, 16, 32, 32)[:, :8]
    for grad in (meta(4, 8, 32, 32), last(4, 8, 32, 32)):
        assert steps(aten.upsample_nearest2d_backward.default, grad, *size) == (REST,)
    assert steps(aten.upsample_nearest2d_backward.default, part, *size) == (REST, Hold(131_072))
    same = ([32, 32], [4, 8, 32, 32], False, 1.0, 1.0)  # bilinear, of no other size: copied as it is
    assert steps(aten.upsample_bilinear2d_backward.default, part, *same) == ()


@pytest.mark.parametrize("shape", [(4, 8, 16, 16), (4, 8, 1, 1), (64, 32)])
def test_the_native_batch_norm_makes_the_gradients_of_its_scale_first(shape: tuple[int, ...]) -> None:
    """They come from held sums for channels last, images of one pixel and matrices; the input's is last."""
    x = last(*shape, dtype=torch.bfloat16) if shape[-1] == 16 else meta(*shape, dtype=torch.bfloat16)
    scale = meta(shape[1], dtype=torch.bfloat16)
    args = (x, x, scale, scale, scale, scale, scale, True, 1e-5, [True, True, True])
    sums = Hold(4 * shape[1])
    made = steps(aten.native_batch_norm_backward.default, *args, out=(x, scale, scale))
    assert made == (sums, sums, Output(1), Output(1), REST)


def test_softmax_multiplies_gradient_and_output_first() -> None:
    """The product stands beside the result; it and the output are copied where they are not contiguous."""
    plain, other, size = meta(*X), crossed(*X), Hold(X_BYTES)

    def backward(grad: Tensor, output: Tensor) -> tuple[Op, ...]:
        args = (grad, output, -1, torch.float32)
        return steps(aten._softmax_backward_data.default, *args, out=plain)

    assert backward(plain, plain) == (REST, size)
    assert backward(meta(4, 16, 1, 20).expand(X), plain) == (REST, size)
    assert backward(other, plain) == backward(plain, other) == (REST, size, size)
    assert backward(other, other) == (REST, size, size, size)


# ---- normalisation


def test_layer_norm_copies_strided_inputs_first() -> None:
    """The copy is made before the outputs and lives beside them."""
    weight = meta(6)
    x = meta(2, 6, 4).transpose(1, 2)
    assert steps(aten.native_layer_norm.default, x, [6], weight, weight, 1e-5) == (Hold(192), REST)
    assert steps(aten.native_layer_norm.default, meta(2, 4, 6), [6], weight, weight, 1e-5) == (REST,)


def backward_of_layer_norm(rows: int, columns: int) -> tuple[Op, ...]:
    x, weight, figure = meta(rows, columns), meta(columns), meta(rows, 1)
    args = (x, x, [columns], figure, figure, weight, weight, [True, True, True])
    return steps(aten.native_layer_norm_backward.default, *args)


def test_layer_norm_with_many_rows_sums_in_two_passes() -> None:
    """401,408 rows of 96 (ConvNeXt at batch 128): 10,922 rows of partial sums for each of two gradients.

    What was made for a gradient first is freed when its sum is there, as an allocator recorded it with torch
    2.13 on an emulated GPU.
    """
    partial = Hold(10_922 * 96 * 4)
    summed = (OUTPUT, Hold(4 * 96 * 86 * 64), Hold(8), Release(2))  # 86 blocks per output
    assert backward_of_layer_norm(128 * 56 * 56, 96) == (
        OUTPUT, Hold(384), Hold(384), partial, partial, *summed, ReleaseBeneath(3),
        *summed, ReleaseBeneath(2),
    )  # fmt: skip
    assert backward_of_layer_norm(128 * 197, 768) == (OUTPUT, REST)
    assert backward_of_layer_norm(64 * 1024, 96) == (OUTPUT, REST)


def test_group_norm() -> None:
    """Scale and shift per sample and channel; in the backward pass two sums and three coefficients."""
    x, weight, figure = meta(2, 6, 4, 4), meta(6), meta(2, 3)
    assert steps(aten.native_group_norm.default, x, weight, weight, 2, 6, 16, 3, 1e-5) == (
        REST, Hold(48), Hold(48),
    )  # fmt: skip
    assert steps(aten.native_group_norm.default, x, None, None, 2, 6, 16, 3, 1e-5) == (REST,)
    args = (x, x, figure, figure, weight, 2, 6, 16, 3, [True, True, True])
    assert steps(aten.native_group_norm_backward.default, *args) == (
        REST, Hold(48), Hold(48), Hold(24), Hold(24), Hold(48),
    )  # fmt: skip


def test_group_norm_in_half_precision_keeps_exact_moments_first() -> None:
    """Mean and deviation per sample and group as floats, from torch 2.13 on."""
    x, weight = meta(2, 6, 4, 4, dtype=torch.bfloat16), meta(6, dtype=torch.bfloat16)
    args = (x, weight, weight, 2, 6, 16, 3, 1e-5)
    assert steps(aten.native_group_norm.default, *args) == (
        REST, Hold(24), Hold(24), Hold(48), Hold(48),
    )  # fmt: skip
    older = Target((8, 6), 80, torch=(2, 12))
    rule = rule_of(aten.native_group_norm.default)
    assert rule is not None and rule(args, None, older)[1:] == (Hold(48), Hold(48))


def test_group_norm_over_channels_last() -> None:
    """Moments per sample, group and row of 24 bytes; 4 rows of 4 pixels."""
    x, weight = last(2, 6, 4, 4), meta(6)
    ops = steps(
        aten.native_group_norm.default, x, weight, weight, 2, 6, 16, 3, 1e-5, out=(x, meta(2, 3), meta(2, 3))
    )
    assert ops == (REST, 2 * 3 * 4 * 24, Hold(48), Hold(48))


def test_batch_norm_in_bfloat16_and_channels_last() -> None:
    """bfloat16 has no cuDNN: staging of 4 figures for 64 channels and 98 rows of blocks, and semaphores."""
    x, weight = last(32, 64, 56, 56, dtype=torch.bfloat16), meta(64)
    args = (x, weight, weight, weight, weight, True, 0.1, 1e-5)
    assert steps(aten.native_batch_norm.default, *args) == (Hold(4 * 64 * 128 * 4), Hold(8))
    plain = (meta(32, 64, 56, 56, dtype=torch.bfloat16), *args[1:])
    assert steps(aten.native_batch_norm.default, *plain) == ()


def test_batch_norm_of_volumes_in_channels_last_reduces_to_moments() -> None:
    """In bfloat16 a copy in float32 and the partial results of a reduction, as an allocator recorded them on
    an emulated RTX 5090; other layouts reduce as well.
    """
    x, weight = last(6, 64, 48, 48, 48, dtype=torch.bfloat16), meta(64)
    args = (x, weight, weight, weight, weight, True, 0.1, 1e-5)
    rule = rule_of(aten.native_batch_norm.default)
    assert rule is not None
    ops = rule(args, (x, meta(64), meta(64)), Target.for_capability((12, 0), sm_count=170))
    assert ops == (REST, Hold(169_869_312), Hold(133_693_440), Hold(4))
    crossed = meta(8, 32, 16, 32, dtype=torch.bfloat16).transpose(1, 2)
    assert steps(aten.native_batch_norm.default, crossed, *[meta(16)] * 4, *args[5:])[:2] == (
        REST, Hold(4 * 8 * 16 * 32 * 32)
    )  # fmt: skip


def test_batch_norm_beyond_indices_of_32_bits_reduces_to_moments() -> None:
    """The copy in float32 is the 10,418,651,136 bytes that an allocator recorded on an emulated RTX 3090."""
    large, weight = meta(46, 64, 96, 96, 96, dtype=torch.bfloat16), meta(64, dtype=torch.bfloat16)
    args = (large, weight, weight, weight, weight, True, 0.1, 1e-5)
    assert steps(aten.native_batch_norm.default, *args)[:2] == (REST, Hold(10_418_651_136))


def test_batch_norm_wants_the_gradient_in_the_inputs_format() -> None:
    """A contiguous gradient of a channels-last activation is copied, and an expanded one."""
    weight = meta(6)
    for x, grad, size in (
        (last(2, 6, 4, 4), meta(2, 6, 4, 4), 768),
        (meta(2, 6, 4, 4), last(2, 6, 4, 4), 768),
        (meta(2, 6, 4, 4), meta(2, 6, 1, 1).expand(2, 6, 4, 4), 768),
        (last(2, 6, 4, 4), last(2, 6, 4, 4), 0),
    ):
        args = (grad, x, weight, weight, weight, weight, weight, True, 1e-5, [True] * 3)
        ops = steps(aten.native_batch_norm_backward.default, *args, out=(x, weight, weight))
        copies, rest = ops[: ops.index(REST)], ops[ops.index(REST) + 1 :]
        assert copies == ((Hold(size),) if size else ())
        assert rest == ((Hold(1572),) if x.stride(1) == 1 else ())


@pytest.mark.parametrize(
    ("dtype", "samples", "channels", "extent", "forward", "backward"),
    [
        (torch.float32, 1, 8, 4, 1592, 1572),
        (torch.float32, 8, 64, 14, 13976, 9764),
        (torch.float32, 32, 2048, 7, 414000, 279712),
        (torch.float32, 128, 64, 112, 12946484, 8564772),
        (torch.float16, 1, 32, 14, 2108, 2596),
        (torch.float16, 8, 2048, 8, 67248, 99488),
        (torch.float16, 128, 12, 128, 6764804, 11186212),
    ],
)
def test_batch_norm_of_cudnn_in_channels_last_has_the_workspaces_that_a_gpu_gave(
    dtype: torch.dtype, samples: int, channels: int, extent: int, forward: int, backward: int
) -> None:
    """The bytes are what cuDNN 9.19 answered on an H200 for its persistent spatial mode."""
    x, weight = last(samples, channels, extent, extent, dtype=dtype), meta(channels)
    args = (x, weight, weight, weight, weight, True, 0.1, 1e-5)
    assert steps(aten.native_batch_norm.default, *args) == (REST, Hold(forward))
    back = (x, x, weight, weight, weight, weight, weight, True, 1e-5, [True] * 3)
    out = (x, weight, weight)
    assert steps(aten.native_batch_norm_backward.default, *back, out=out) == (REST, Hold(backward))
