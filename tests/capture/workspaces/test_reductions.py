"""Workspaces of reductions and of matrix products."""

from planner.capture.workspaces.ops import Hold
from planner.capture.workspaces.tensor.reductions import reduction
from planner.program.target import Target
from tests.helpers.models import AMPERE, HOPPER
from tests.helpers.workspaces import REST, aten, meta, steps


def test_operands_that_cublas_cannot_read_are_copied() -> None:
    """Rows or columns must be next to each other; an expanded gradient has neither."""
    grad = meta(1).expand(2, 5)
    assert steps(aten.mm.default, grad.t(), meta(2, 3)) == (Hold(40),)
    assert steps(aten.mm.default, meta(3, 4).t(), meta(3, 5)) == ()
    assert steps(aten.addmm.default, meta(5), meta(2, 6)[:, :3], meta(3, 5)) == ()
    assert steps(aten.addmm.default, meta(5), meta(2, 6)[:, ::2], meta(3, 5)) == (Hold(24),)
    assert steps(aten.bmm.default, meta(2, 3, 4).permute(2, 0, 1), meta(4, 3, 5)) == (Hold(96),)
    assert steps(aten.bmm.default, meta(2, 3, 4), meta(1, 4, 5).expand(2, 4, 5)) == ()


# ---- reductions


def test_a_bias_gradient_splits_its_rows_over_the_gpu() -> None:
    """25,216 rows of 768: 168 blocks per output on 84 multiprocessors, each with 32 x 4 outputs in a buffer
    that has room for 128 times as many (Reduce.cuh multiplies by the block's width once more).
    """
    assert reduction(meta(25216, 768), [0], 4, Target.for_capability(AMPERE)) == (
        Hold(4 * 768 * 168 * 128),
        Hold(4 * 6),
    )
    assert steps(aten.sum.dim_IntList, meta(25216, 768), [0], True) == (Hold(66_060_288), Hold(24))
    hopper = steps(aten.sum.dim_IntList, meta(25216, 768), [0], True, capability=HOPPER)
    assert hopper == (Hold(4 * 768 * 352 * 128), Hold(24))


def test_reductions_that_stay_in_their_blocks() -> None:
    """Few inputs per output, or outputs enough for all multiprocessors: nothing is handed over."""
    assert steps(aten.mean.dim, meta(128, 2048, 7, 7), [2, 3]) == ()
    assert steps(aten.sum.dim_IntList, meta(128, 1000), [0]) == ()
    assert steps(aten.sum.default, meta(10)) == ()
    assert steps(aten.amax.default, meta(100_000, 512), [1]) == ()


def test_a_sum_of_everything() -> None:
    """19,267,584 inputs: 512 threads with 4 values at a time, 252 blocks, one partial result each."""
    assert steps(aten.sum.default, meta(128, 3, 224, 224)) == (Hold(4 * 252), Hold(4))


def test_partial_results_that_are_pairs_are_larger() -> None:
    """Mean and variance take four times a sum's buffer, a maximum with its place as much."""
    x = meta(128, 3, 224, 224)
    assert steps(aten.var.correction, x, out=meta()) == (Hold(16 * 252), Hold(4))
    assert steps(aten.argmax.default, x, out=meta()) == (Hold(16 * 252), Hold(4))


def test_logsumexp_takes_the_exponentials() -> None:
    """The maxima and a tensor like the input, before the result."""
    assert steps(aten.logsumexp.default, meta(4, 5, 6), [-1]) == (Hold(80), Hold(480), REST)
