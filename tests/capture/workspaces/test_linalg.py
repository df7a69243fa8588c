"""Workspaces of determinants and solves."""

import pytest
import torch

from planner.capture.workspaces.ops import Hold, Op, Release, UseCublas
from tests.helpers.workspaces import REST, aten, meta, steps

POINTERS = (Hold(32), Hold(32), UseCublas(), Release(2))


def test_a_determinant_counts_its_pivots() -> None:
    """A matrix of 48 x 48: a status, the pivots compared with 1, 2, 3, ..., and its diagonal twice."""
    assert steps(aten._linalg_slogdet.default, meta(48, 48)) == (
        REST, Hold(4), Hold(8), Hold(192), Hold(48), 384, Release(2), Hold(192), 4, Release(2), 192,
    )  # fmt: skip


def test_a_batch_is_factored_by_cublas() -> None:
    """Four matrices: a pointer to each."""
    assert steps(aten.linalg_lu_factor_ex.default, meta(4, 16, 16)) == (
        REST, Hold(32), UseCublas(), Release(1),
    )  # fmt: skip
    assert steps(aten.linalg_lu_factor_ex.default, meta(16, 16)) == (REST,)


@pytest.mark.parametrize(
    ("shape", "mode", "ops"),
    [
        ((48, 16), "reduced", (Hold(64), 4, 4)),
        ((16, 48), "reduced", (Hold(64), 4, 4)),
        ((48, 16), "r", (Hold(64), Hold(4 * 48 * 16), 4)),
        ((4, 16, 16), "complete", (Hold(256), *POINTERS, 4)),
    ],
)
def test_an_orthogonal_factorization_works_in_its_results(
    shape: tuple[int, ...], mode: str, ops: tuple[Op, ...]
) -> None:
    """The factors of the reflections, and a status each of both parts; a copy if no result has the shape."""
    assert steps(aten.linalg_qr.default, meta(*shape), mode) == (REST, *ops)


@pytest.mark.parametrize(
    ("shape", "columns", "ops"),
    [
        ((4, 16, 16), 16, POINTERS),
        ((12, 12), 5, (4,)),
        ((4, 16, 16), 5, POINTERS),
        (
            (256, 256),
            5,
            (Hold(2048), Hold(2048), Hold(2048), Hold(5120), UseCublas(), UseCublas(), Release(4)),
        ),
    ],
)
def test_a_solve_takes_the_kernel_of_its_sizes(
    shape: tuple[int, ...], columns: int, ops: tuple[Op, ...]
) -> None:
    """cuBLAS for batches, cuSOLVER for one small matrix, and two triangular solves for a large one."""
    pivots = meta(*shape[:-1], dtype=torch.int32)
    right = meta(*shape[:-1], columns)
    assert steps(aten.linalg_lu_solve.default, meta(*shape), pivots, right) == (REST, *ops)


def test_a_transposed_solve_permutes_a_copy() -> None:
    """The permutation of 256 rows, and the solution once more."""
    args = (meta(256, 256), meta(256, dtype=torch.int32), meta(256, 5))
    assert steps(aten.linalg_lu_solve.default, *args, True, True, out=meta(256, 5)) == (
        REST, Hold(2048), UseCublas(), UseCublas(), 5120, Release(1),
    )  # fmt: skip
