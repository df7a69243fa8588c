"""Operators that the recorder runs by their parts give ATen's own values, and record what the parts take."""

import itertools

import pytest
import torch

from planner.capture.recorder.composed import COMPOSED
from planner.jobs import Mode
from tests.capture.recorder.test_recorder import Apply
from tests.helpers.models import job_of, story, trace_of

aten = torch.ops.aten
GRID, TRILINEAR = aten.affine_grid_generator.default, aten._trilinear.default


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("size", [(2, 3, 4, 5), (2, 3, 4, 1), (2, 1, 3, 4, 5)])
def test_a_sampling_grid_is_that_of_aten(size: tuple[int, ...], align_corners: bool) -> None:
    """In two and three dimensions, also along a dimension of one."""
    rank = len(size) - 2
    theta = torch.rand(size[0], rank, rank + 1)
    torch.testing.assert_close(COMPOSED[GRID](theta, size, align_corners), GRID(theta, size, align_corners))


# Shapes with the dimensions that each operand lacks: a bilinear layer and its three gradients.
OPERANDS = {
    "layer": (((2, 3), [1, 3]), ((4, 3, 5), [0]), ((2, 5), [1, 2]), [2, 3]),
    "first input": (((2, 4), [2, 3]), ((4, 3, 5), [0]), ((2, 5), [1, 2]), [1, 3]),
    "weight": (((2, 3), [1, 3]), ((2, 4), [2, 3]), ((2, 5), [1, 2]), [0]),
    "second input": (((2, 3), [1, 3]), ((4, 3, 5), [0]), ((2, 4), [2, 3]), [1, 2]),
}


@pytest.mark.parametrize(("name", "unrolled"), list(itertools.product(OPERANDS, range(4))))
def test_products_of_three_tensors_are_those_of_aten(name: str, unrolled: int) -> None:
    """By whichever dimension the sum is taken apart."""
    *operands, summed = OPERANDS[name]
    tensors = [torch.rand(shape, dtype=torch.float64) for shape, _ in operands]
    args = (*tensors, *(expanded for _, expanded in operands), summed, unrolled)
    torch.testing.assert_close(COMPOSED[TRILINEAR](*args), TRILINEAR(*args))


def test_a_sampling_grid_takes_its_base_coordinates() -> None:
    """A grid of 4 x 5 of one sample, beside 3 coordinates for each of its points, of which two are ranges."""
    function = lambda theta: GRID(theta.view(-1, 2, 3), (theta.shape[0], 1, 4, 5), True)  # noqa: E731
    trace = trace_of(lambda: Apply(function), job_of("6", steps=1, mode=Mode.INFER), 1)
    blocks = [line for line in story(trace) if "workspaces" not in line]
    base, ranges, grid = 4 * 60, (4 * 5, 4 * 4), 4 * 40
    moves = [f"+{base} temporaries"]
    for size in ranges:
        moves += [f"+{size} temporaries", f"-{size}"]
    assert blocks[4:-1] == [*moves, f"+{grid} temporaries", f"-{base}"]


def test_an_exponential_of_matrices_takes_ten_of_them_at_a_time() -> None:
    """Two samples of 8 x 8: five powers and five sums of them, beside the result, the matrices whose norm is
    large, and these scaled.
    """
    trace = trace_of(lambda: Apply(torch.matrix_exp), job_of("8x8", steps=1, mode=Mode.INFER), 2)
    matrices = 2 * 8 * 8 * 4
    large = [line for line in story(trace) if abs(_size(line)) >= matrices and "workspaces" not in line]
    one, five = f"+{matrices} temporaries", f"+{5 * matrices} temporaries"
    assert large[1:] == [
        one, f"-{matrices}",  # magnitudes, for the norms
        one, one, one, five,  # result, matrices, scaled matrices, powers
        one, f"-{matrices}",  # the power of 0
        five, f"-{5 * matrices}",  # sums, without the powers
        one, one, f"-{matrices}",  # squares of squares
        f"-{matrices}", f"-{5 * matrices}", f"-{matrices}", f"-{matrices}",
    ]  # fmt: skip


def _size(line: str) -> int:
    first = line.split()[0]
    return int(first) if first[0] in "+-" else 0


@pytest.mark.parametrize("shape", [(0, 0), (1, 1), (3, 3), (2, 5, 3, 3)])
def test_an_exponential_of_matrices_is_laid_out_as_by_aten(shape: tuple[int, ...]) -> None:
    """Contiguous, also for transposed matrices; complex numbers stay complex."""
    x = torch.rand(shape, dtype=torch.complex64)
    for given in (x, x.mT) if len(shape) == 2 else (x,):
        out = COMPOSED[aten.linalg_matrix_exp.default](given.to("meta"))
        expected = torch.matrix_exp(given)
        assert (out.shape, out.dtype) == (expected.shape, expected.dtype)
        assert out.stride() == expected.stride()


@pytest.mark.parametrize("hermitian", [False, True])
@pytest.mark.parametrize("shape", [(4, 4), (2, 3, 3), (2, 2, 3, 3)])
def test_a_pseudoinverse_is_that_of_aten(shape: tuple[int, ...], hermitian: bool) -> None:
    """From singular values, or from eigenvalues of a symmetric matrix; those below a tolerance count as 0."""
    x = torch.rand(shape, dtype=torch.float64)
    x = x + x.mT if hermitian else x
    pinv, rtol = aten.linalg_pinv.atol_rtol_tensor, torch.tensor(0.2, dtype=torch.float64)
    atol = torch.ones((), dtype=torch.float64)
    for given in ({}, {"rtol": rtol}, {"atol": atol}, {"atol": atol, "rtol": rtol}):
        tolerances = {**given, "hermitian": hermitian}
        torch.testing.assert_close(COMPOSED[pinv](x, **tolerances), pinv(x, **tolerances))


def test_a_pseudoinverse_keeps_its_factors_until_it_is_made() -> None:
    """Of 16 x 8: singular vectors of both sides, the product of one with the inverses, and the result."""
    trace = trace_of(lambda: Apply(torch.linalg.pinv), job_of("16x8", steps=1, mode=Mode.INFER), 1)
    tall, small = 16 * 8 * 4, 8 * 8 * 4
    large = [line for line in story(trace) if abs(_size(line)) in (tall, small)]
    assert large[1:] == [
        f"+{tall} temporaries", f"+{small} temporaries",  # vectors
        f"+{tall} workspaces", f"-{tall}",
        f"+{small} temporaries", f"+{tall} temporaries", f"-{small}",
        f"-{tall}", f"-{small}",
    ]  # fmt: skip
