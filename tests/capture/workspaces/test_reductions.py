"""Workspaces of reductions and of matrix products."""

import torch

from planner.capture.workspaces.ops import Hold, Outputs, Release, ReleaseBeneath
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


def test_the_largest_of_what_is_not_contiguous_is_that_of_a_copy() -> None:
    """`max` of everything copies a transposed input once its result is there; `amax` reads it as it is."""
    x = meta(1000, 300).t()
    assert steps(aten.max.default, x, out=meta()) == (Outputs(), Hold(4 * 300_000), Hold(4 * 37), Hold(4))
    assert Hold(4 * 300_000) not in steps(aten.amax.default, x, out=meta())


def test_partial_results_that_are_pairs_are_larger() -> None:
    """Mean and variance take four times a sum's buffer, a maximum with its place as much."""
    x = meta(128, 3, 224, 224)
    assert steps(aten.var.correction, x, out=meta()) == (Hold(16 * 252), Hold(4))
    assert steps(aten.argmax.default, x, out=meta()) == (Hold(16 * 252), Hold(4))


def test_logsumexp_takes_the_exponentials() -> None:
    """The maxima, for a time their sizes and which are infinite, and a tensor like the input."""
    expected = (Hold(80), Hold(80), 20, Release(1), Hold(480), REST)
    assert steps(aten.logsumexp.default, meta(4, 5, 6), [-1]) == expected


def test_sums_convert_what_is_no_number_of_their_kind() -> None:
    """64 x 4,096 truth values become as many int64 first; halves are converted as they are read."""
    x = meta(64, 4096, dtype=torch.bool)
    assert steps(aten.sum.dim_IntList, x, [1]) == (REST, Hold(2_097_152))
    halves = meta(64, 4096, dtype=torch.float16)
    assert steps(aten.sum.dim_IntList, halves, [1], False, out=meta(64)) == ()
    assert steps(aten.mean.default, x, out=meta())[:2] == (REST, Hold(1_048_576))
    assert steps(aten.count_nonzero.default, meta(64, 4096))[:3] == (Hold(262_144), REST, Hold(2_097_152))


def test_extrema_pass_on_values_of_their_own_type() -> None:
    """The buffer of a largest half is half as large as that of a number, that of truth values a quarter."""
    sizes = [
        steps(aten.max.default, meta(64, 4096, dtype=dtype))[0].number  # type: ignore[union-attr]
        for dtype in (torch.float32, torch.float16, torch.bool)
    ]
    assert sizes[0] == 2 * sizes[1] == 4 * sizes[2] > 0


def test_gradients_of_distances_are_made_for_each_pair_of_rows() -> None:
    """Of 2 x 30 and 2 x 40 rows of 8; the first are transposed, and one sample's other rows are expanded."""
    func = aten._cdist_backward.default
    one, other, distances = meta(2, 30, 8), meta(2, 40, 8), meta(2, 30, 40)
    pairs = Hold(4 * 2 * 40 * 30 * 8)
    assert steps(func, distances, one, other, 1.0, distances) == (REST, pairs)
    transposed = meta(2, 8, 30).transpose(1, 2)
    copies = Hold(4 * 2 * 30 * 8), Hold(4 * 2 * 40 * 8)
    assert steps(func, distances, transposed, other[:1], 1.0, distances) == (*copies, REST, pairs)
    assert steps(func, distances, one, other, 0.0, distances) == (REST,)


def test_gradients_of_own_distances_are_made_for_each_pair_of_rows() -> None:
    """Of 64 rows of 1024, each with 63 others; the sum of 1499 gradients of 6000 numbers is split."""
    func = aten._pdist_backward.default
    x, distances = meta(64, 1024), meta(64 * 63 // 2)
    assert steps(func, distances, x, 2.0, distances) == (REST, Hold(63 * 64 * 1024 * 4))
    assert steps(func, distances, x, 0.0, distances) == ()
    x, distances = meta(1500, 4), meta(1500 * 1499 // 2)
    assert steps(func, distances, x, 2.0, distances) == (
        REST, Hold(35_976_000), Hold(67_584_000), Hold(188),
    )  # fmt: skip
    assert steps(func, meta(0), meta(1, 5), 2.0, meta(0)) == ()


def test_norms_of_differences_and_log_gammas_take_their_terms() -> None:
    """A broadcast difference before the result; an element for each of four offsets, which are freed."""
    assert steps(aten.dist.default, meta(40, 8), meta(8), 2) == (Hold(1280), REST)
    terms = Hold(16), Hold(16 * 320), ReleaseBeneath(1)
    assert steps(aten.mvlgamma.default, meta(40, 8), 4) == (*terms, REST)


def test_few_elements_are_compared_with_all() -> None:
    """Up to 10 times the 0.145th power of their number, 28 for 1280; more elements are sorted."""
    func = aten.isin.Tensor_Tensor
    assert steps(func, meta(40, 32), meta(28)) == (REST, Hold(28 * 1280), Hold(1280))
    assert steps(func, meta(40, 32), meta(29)) == ()


def test_distances_copy_sides_that_are_expanded_or_not_contiguous() -> None:
    """Before the result."""
    func = aten._cdist_forward.default
    one, other = meta(2, 30, 8), meta(2, 40, 9)[..., :8]
    assert steps(func, one, one, 1.0, None) == (REST,)
    assert steps(func, one, other, 1.0, None) == (Hold(4 * 2 * 40 * 8), REST)
    assert steps(func, one[:1], one, 1.0, None) == (Hold(4 * 2 * 30 * 8), REST)


def test_extrema_are_reduced_as_pairs() -> None:
    """Pairs of two elements for 252 blocks; a tensor that is not contiguous is copied for all its extrema."""
    func, x = aten.aminmax.default, meta(2, 128, 3, 112, 224)
    pairs = Hold(8 * 252), Hold(4)
    assert steps(func, x) == (REST, *pairs)
    assert steps(func, x.transpose(0, 1)) == (REST, Hold(77_070_336), *pairs)
    assert steps(func, x.view(-1), 0, out=(meta(), meta())) == pairs
    one = Hold(4)
    assert steps(aten.histc.default, x, 10) == (REST, one, one, *pairs, Release(2))
    assert steps(aten.histc.default, x, 10, -1, 1) == ()
    numbers = meta(19_267_584, dtype=torch.int64)
    one, pairs = Hold(8), (Hold(16 * 252), Hold(4))
    assert steps(aten.bincount.default, numbers, out=meta(10)) == (one, one, *pairs, Release(2), REST)
