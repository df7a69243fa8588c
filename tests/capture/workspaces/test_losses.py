"""Workspaces of losses, distances and Fourier transforms."""

import pytest
import torch
from torch import Tensor, nn

from planner.capture.workspaces.nn.losses import RULES
from planner.capture.workspaces.ops import Hold, Outputs, Release, ReleaseBeneath
from planner.jobs import Mode
from planner.program import Target
from tests.capture.recorder.test_recorder import Apply
from tests.helpers.models import AMPERE, born, job_of, trace_of
from tests.helpers.workspaces import REST, aten, meta, steps


def test_a_mean_squared_error_is_made_in_full_first() -> None:
    """The result, then a loss per element; without reduction the result is that loss."""
    x = meta(4, 5)
    assert steps(aten.mse_loss.default, x, x) == (REST, Hold(80))
    assert steps(aten.mse_loss.default, x, x, 0) == ()


def test_a_soft_margin_loss_is_made_in_full_first() -> None:
    """Its mean is copied into it. The gradient takes two factors, and the exponential of their product."""
    x = meta(4, 5)
    assert steps(aten.soft_margin_loss.default, x, x) == (REST, Hold(4))
    assert steps(aten.soft_margin_loss.default, x, x, 0) == ()
    gradient = (Hold(80), Hold(80), Hold(80), ReleaseBeneath(1), ReleaseBeneath(1), REST)
    assert steps(aten.soft_margin_loss_backward.default, meta(), x, x, 1) == gradient


def test_cross_entropy_of_logits_takes_two_tensors() -> None:
    """The logarithm of the sigmoid and the loss per element, before the result."""
    x = meta(4, 5)
    func = aten.binary_cross_entropy_with_logits.default
    assert steps(func, x, x) == (Hold(80), Hold(80), REST)
    assert steps(func, x, x, None, None, 0) == (Hold(80), REST)


def test_binary_cross_entropy_keeps_the_whole_loss() -> None:
    """Its mean lies in the storage of the loss per element, which lives as long as the mean does."""

    def loss(x: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy(x, torch.empty_like(x))

    trace = trace_of(lambda: Apply(loss), job_of("25", mode=Mode.INFER), 2)
    assert born(trace, "binary_cross_entropy") == [200, 4]


def test_a_mean_squared_error_keeps_the_whole_loss() -> None:
    """Its result is resized to a scalar, which leaves it the storage of the loss per element."""

    def loss(x: Tensor) -> Tensor:
        return nn.functional.mse_loss(x, torch.empty_like(x))

    trace = trace_of(lambda: Apply(loss), job_of("25", mode=Mode.INFER), 2)
    assert born(trace, "mse_loss") == [200, 200]


def test_ctc_loss_keeps_the_forward_variables() -> None:
    """Four samples, 50 steps, targets of up to 30 labels with blanks between: 61 states."""

    def loss(x: Tensor) -> Tensor:
        targets = torch.empty(4, 30, dtype=torch.int64, device=x.device)
        scores = x.transpose(0, 1).log_softmax(2)
        return nn.functional.ctc_loss(scores, targets, torch.full((4,), 50), torch.tensor([30, 7, 9, 2]))

    trace = trace_of(lambda: Apply(loss), job_of("50x20"), 4)
    assert born(trace, "_ctc_loss") == [32, 32, 32, 4 * 50 * 61 * 4, 16]


@pytest.mark.parametrize("zero_infinity", [False, True])
def test_backward_of_a_large_ctc_loss_sums_up_the_blanks(zero_infinity: bool) -> None:
    """16 samples of 400 steps, 29 labels, 60 targets: sums and maxima of 61 states of blanks, a mask of
    infinite maxima; the gradients are made once more where infinite losses are replaced.
    """
    losses, scores, variables = meta(16), meta(400, 16, 29), meta(16, 400, 121)
    targets = torch.empty(16, 60, dtype=torch.int64, device="meta")
    lengths = [400] * 16, [60] * 16
    args = losses, scores, targets, *lengths, losses, variables, 28, zero_infinity
    blanks, rows = Hold(16 * 400 * 61 * 4), Hold(16 * 400 * 4)
    total = (blanks, rows, rows, Hold(16 * 400), Release(2), blanks, rows, Release(4))
    gradient = (Hold(400 * 16 * 29 * 4), *total, Hold(4), Hold(16), Outputs())
    before = (Hold(128), Hold(128), Hold(128), Hold(16 * 400 * 121 * 4))
    expected = gradient if zero_infinity else (Outputs(), *total)
    rule = RULES["_ctc_loss_backward _ctc_loss_backward.Tensor"]
    assert rule(args, scores, Target.for_capability(AMPERE)) == (*before, *expected)


# ---- transforms


def test_distances_extend_both_sets_of_points() -> None:
    """30 and 40 points of 5 coordinates, extended to 7 by norms and ones, which are freed then."""
    x, y = meta(2, 30, 5), meta(2, 40, 5)
    assert steps(aten._euclidean_dist.default, x, y) == (
        Hold(1200), Hold(240), ReleaseBeneath(1), Hold(240),
        Hold(1600), Hold(320), ReleaseBeneath(1), Hold(320),
        Hold(1200), Hold(1680), ReleaseBeneath(4), ReleaseBeneath(4), ReleaseBeneath(1),
        Hold(2240), ReleaseBeneath(3), ReleaseBeneath(2), REST,
    )  # fmt: skip


def test_fourier_transforms_take_a_work_area() -> None:
    """A work area has the size of the larger of input and output; to real values the input is copied too."""
    x, y = meta(2, 8, 8), meta(2, 8, 5, dtype=torch.complex64)
    assert steps(aten._fft_r2c.default, x, [1, 2], 0, True) == (REST, 640)
    assert steps(aten._fft_c2r.default, y, [1, 2], 2, 8) == (REST, Hold(640), 640)


def test_fourier_transforms_copy_what_cufft_cannot_read_as_it_lies() -> None:
    """After the output comes a copy of images in channels-last format, whose samples and channels are not one
    dimension, of texts transformed along their positions, and of expanded gradients.
    """
    images = meta(2, 4, 8, 8).contiguous(memory_format=torch.channels_last)
    texts = meta(2, 16, 4)
    spread = meta(1, 1, 1, 1).expand(2, 4, 8, 8)
    rows = meta(2, 16, 8)[:, ::2]
    assert steps(aten._fft_r2c.default, images, [2, 3], 0, True) == (REST, Hold(2048), 2 * 4 * 8 * 5 * 8)
    assert steps(aten._fft_r2c.default, texts, [1], 0, True) == (REST, Hold(512), 2 * 9 * 4 * 8)
    assert steps(aten._fft_r2c.default, spread, [2, 3], 0, True) == (REST, Hold(2048), 2 * 4 * 8 * 5 * 8)
    assert steps(aten._fft_r2c.default, rows, [2], 0, True) == (REST, 2 * 8 * 5 * 8)
