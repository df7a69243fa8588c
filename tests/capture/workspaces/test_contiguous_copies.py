"""Copies that kernels make of operands that they cannot read, and when.

The order is as an allocator recorded it with torch 2.13 on an emulated GPU.
"""

from typing import Any

import pytest
import torch

from planner.capture.meta_kernels.run import meta_kernels
from planner.capture.workspaces.ops import Hold, Op
from planner.capture.workspaces.registry import is_unknown, rule_of
from tests.helpers.models import AMPERE
from tests.helpers.workspaces import OUTPUT, REST, aten, crossed, index, last, meta, steps

IMAGE, VOLUME = (2, 4, 8, 8), (2, 4, 8, 8, 8)  # 2,048 and 16,384 bytes
HALF_IMAGE, HALF_VOLUME = (2, 4, 4, 4), (2, 4, 4, 4, 4)  # 512 and 2,048 bytes


def other(*shape: int, **options: Any) -> Any:
    """A tensor in neither format."""
    return meta(shape[1], shape[0], *shape[2:], **options).transpose(0, 1)


def test_unfolding_begins_with_a_block_of_the_inputs_size() -> None:
    """It is resized to the output, and freed with the copy where that is larger; a fold keeps it."""
    x, columns = (2, 64, 32, 32), (2, 576, 1024)
    window = [3, 3], [1, 1], [1, 1], [1, 1]  # kernel, dilation, padding, stride
    assert steps(aten.im2col.default, meta(*x), *window) == (Hold(524_288), REST)
    assert steps(aten.im2col.default, last(*x), *window) == (Hold(524_288), Hold(524_288), REST)
    corners = [1, 1], [1, 1], [0, 0], [2, 2]
    assert steps(aten.im2col.default, last(*x), *corners) == (REST, Hold(524_288))
    kernels = meta_kernels(AMPERE)
    sizes = [
        kernels[aten.im2col.default](meta(*x), *window),
        kernels[aten.im2col.default](meta(*x), *corners),
        kernels[aten.col2im.default](meta(*columns), [32, 32], *window),
    ]
    assert [t.shape for t in sizes] == [columns, (2, 64, 256), x]
    assert [t.untyped_storage().nbytes() for t in sizes] == [4_718_592, 524_288, 4_718_592]


@pytest.mark.parametrize(
    ("func", "args", "copied"),
    [
        (aten._softmax.default, (meta(2, 3, 4).transpose(1, 2), -1, False), 96),
        (aten._log_softmax.default, (last(2, 3, 4, 4), 1, False), 384),
        (aten.max_pool2d_with_indices.default, (meta(2, 6, 4, 4)[:, ::2], [2, 2]), 384),
        (aten.max_pool2d_with_indices.default, (last(2, 6, 4, 4), [2, 2]), 0),
        (aten.max_pool3d_with_indices.default, (other(*VOLUME), [2, 2, 2]), 16_384),
        (aten.avg_pool3d.default, (last(*VOLUME), [2, 2, 2]), 16_384),
        (aten.avg_pool3d.default, (meta(*VOLUME), [2, 2, 2]), 0),
        (aten.cumsum.default, (meta(4, 5).t(), 0), 80),
        (aten.cumsum.default, (meta(4, 5, dtype=torch.int32), 0), 160),  # which makes int64 of it
        (aten.reflection_pad2d.default, (last(*IMAGE), [1, 1, 1, 1]), 2_048),
        (aten.replication_pad2d.default, (last(*IMAGE), [1, 1, 1, 1]), None),
        (aten.replication_pad3d_backward.default, (other(2, 4, 10, 10, 10), meta(*VOLUME), [1] * 6), None),
        (aten.upsample_nearest2d.default, (other(*IMAGE), [16, 16]), 2_048),
        (aten.upsample_nearest2d.default, (last(*IMAGE), [16, 16]), 0),
    ],
    ids=str,
)  # fmt: skip
def test_kernels_copy_what_they_cannot_read(func: Any, args: tuple[Any, ...], copied: int | None) -> None:
    """A contiguous copy beside the outputs; none where the kernel takes the format."""
    if copied is None:
        assert rule_of(func) is None and not is_unknown(func)
    else:
        assert steps(func, *args) == ((REST, Hold(copied)) if copied else (REST,))


def test_adaptive_average_pools_copy_before_their_output() -> None:
    """That of images reads channels last."""
    image = aten._adaptive_avg_pool2d.default
    assert steps(image, other(*IMAGE), [2, 2]) == (Hold(2_048), REST)
    assert steps(image, last(*IMAGE), [2, 2]) == (REST,)
    volume = aten._adaptive_avg_pool3d.default
    assert steps(volume, last(*VOLUME), [2, 2, 2]) == (Hold(16_384), REST)


def test_gradients_of_pools_follow_the_input() -> None:
    """A gradient is brought into the input's format, an input in neither format copied as well."""

    def average(grad: Any, x: Any) -> tuple[Op, ...]:
        args = (grad, x, [2, 2], [2, 2], [0, 0], False, True, None)
        return steps(aten.avg_pool2d_backward.default, *args)

    assert average(meta(*HALF_IMAGE), last(*IMAGE)) == (REST, Hold(512))
    assert average(meta(*HALF_IMAGE), crossed(*IMAGE)) == (REST, Hold(2_048))
    assert average(last(*HALF_IMAGE), crossed(*IMAGE)) == (REST, Hold(2_048), Hold(512))
    assert average(meta(2, 4, 1, 1), last(2, 4, 2, 2)) == (REST,)  # one pixel is in either format
    adaptive = aten._adaptive_avg_pool2d_backward.default
    assert steps(adaptive, meta(*HALF_IMAGE), last(*IMAGE)) == (REST,)
    assert steps(adaptive, last(*HALF_IMAGE), meta(*IMAGE)) == (REST, Hold(512))


def test_kernels_without_channels_last_make_contiguous_results() -> None:
    """A volume in channels last is enlarged to a contiguous result, which is copied to the output."""
    small, large = Hold(2_048), Hold(16_384)
    enlarge = aten.upsample_nearest3d.default
    out = last(*VOLUME)
    assert steps(enlarge, last(*HALF_VOLUME), [8, 8, 8], out=out) == (REST, large, small)
    assert steps(enlarge, other(*HALF_VOLUME), [8, 8, 8], out=meta(*VOLUME)) == (REST, small)
    gradient = aten.upsample_trilinear3d_backward.default
    sizes = ([8, 8, 8], [*HALF_VOLUME], False)
    assert steps(gradient, last(*VOLUME), *sizes, out=last(*HALF_VOLUME)) == (REST, large, small)
    pool = aten.adaptive_max_pool2d_backward.default
    args = (last(*HALF_IMAGE), last(*IMAGE), index(*HALF_IMAGE))
    assert steps(pool, *args, out=last(*IMAGE)) == (REST, Hold(512), Hold(2_048))


def test_the_safe_softmax_zeroes_rows_in_place() -> None:
    """Beside the result are the mask of infinite scores, that of rows without others, and a zero."""
    masks = Hold(2 * 3 * 5), Hold(2 * 3), Hold(4)
    func = aten._safe_softmax.default
    assert steps(func, meta(2, 3, 5), -1) == (REST, *masks)
    copy, *rest = steps(func, meta(2, 5, 3).transpose(1, 2), -1)[1:]
    assert (copy, rest[1:]) == (Hold(120), [*masks])


def test_an_average_of_log_probabilities_is_made_total_first() -> None:
    """`nll_loss2d` makes the total weight before the loss."""
    x, target = other(*IMAGE), index(2, 8, 8)
    ops = steps(aten.nll_loss2d_forward.default, x, target, None, 1, -100)
    assert ops[1:] == (OUTPUT, Hold(2_048))


def test_sampling_by_cudnn_copies_what_is_expanded() -> None:
    """With corners aligned and zeros outside, cuDNN samples; it computes both gradients in any case."""
    func = aten.grid_sampler_2d_backward.default
    x, grid, grad = meta(2, 3, 8, 8), meta(2, 5, 5, 2), meta(2, 3, 5, 5)
    expanded = meta(1).expand(2, 3, 5, 5)
    assert steps(func, grad, x, grid, 0, 0, True, [True, True]) == (REST,)
    assert steps(func, expanded, x, grid, 0, 0, True, [True, True]) == (Hold(600), REST)
    assert steps(func, expanded, x, grid, 0, 0, True, [False, True]) == (Hold(600), Hold(1_536), REST)
    for options in ((1, 0, True), (0, 1, True), (0, 0, False)):
        assert steps(func, expanded, x, grid, *options, [True, True]) == (REST,)
    halves = x.bfloat16(), grid.bfloat16()
    assert steps(func, expanded.bfloat16(), *halves, 0, 0, True, [True, True]) == (REST,)
    turned = meta(2, 2, 5, 5).permute(0, 2, 3, 1)
    assert steps(aten.grid_sampler_2d.default, x, turned, 0, 0, True) == (Hold(400), REST)
    assert steps(aten.grid_sampler_2d.default, x, turned, 0, 0, False) == (REST,)


def test_packing_copies_steps_that_are_not_contiguous() -> None:
    """Three steps of two samples, which are all, and two steps of one sample, each of two numbers."""
    func, lengths = aten._pack_padded_sequence.default, torch.tensor([5, 3])
    assert steps(func, meta(5, 2, 2), lengths, False) == (Hold(16), REST)
    assert steps(func, meta(2, 5, 2), lengths, True) == (Hold(48), REST)
    assert steps(func, meta(5, 2, 2), torch.tensor([5, 5]), False) == (REST,)
