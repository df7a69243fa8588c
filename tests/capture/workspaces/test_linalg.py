"""Workspaces of determinants and solves."""

import pytest
import torch

from planner.capture.workspaces.ops import Hold, Op, Output, Release, ReleaseBeneath, UseCublas
from tests.helpers.workspaces import OUTPUT, REST, aten, meta, steps

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
    ("shape", "is_by_cublas"),
    [((600, 16, 16), True), ((16, 17, 17), True), ((17, 17, 17), False), ((16, 128, 128), True),
     ((2, 129, 129), False), ((4, 16, 8), False)],
)  # fmt: skip
def test_cublas_factors_small_matrices_in_small_batches(shape: tuple[int, ...], is_by_cublas: bool) -> None:
    """Matrices of 16 rows in any batch, of 128 rows in batches up to 16, as on an emulated L4."""
    ops = (Hold(8 * shape[0]), UseCublas(), Release(1)) if is_by_cublas else ()
    assert steps(aten.linalg_lu_factor_ex.default, meta(*shape)) == (REST, *ops)


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


SOLVES = (Hold(2048), Hold(2048), Hold(2048), Hold(262_144), UseCublas(), UseCublas(), Release(4))


def test_an_inverse_factors_a_copy_and_solves_for_the_identity() -> None:
    """A matrix of 256 x 256: the factors, 256 pivots, three permutations, and the identity permuted."""
    ops = (REST, Hold(262_144), Hold(1024), *SOLVES)
    assert steps(aten.linalg_inv_ex.default, meta(256, 256)) == ops
    assert steps(aten.linalg_inv_ex.default, meta(256, 256).mT) == ops


def test_equations_are_solved_in_the_result() -> None:
    """Factors and pivots are outputs. A vector is solved in a copy; from the right, the order is restored."""
    solve, matrix = aten._linalg_solve_ex.default, meta(256, 256)
    out = (meta(256, 256), matrix, meta(256), meta())
    assert steps(solve, matrix, meta(256, 256), out=out) == (REST, *SOLVES)
    assert steps(solve, meta(12, 12), meta(12)) == (REST, Hold(48), 4)
    right = (meta(3, 256), matrix, meta(256), meta())
    assert steps(solve, matrix, meta(3, 256), False, out=right) == (
        REST, Hold(2048), UseCublas(), UseCublas(), 3072, Release(1),
    )  # fmt: skip


def test_a_batch_has_its_permutations_written_out() -> None:
    """The numbers of 40 rows are repeated for each of 20 matrices, then freed."""
    batched = (Hold(160), Hold(160), UseCublas(), Release(2))
    assert steps(aten.linalg_inv_ex.default, meta(20, 40, 40)) == (
        REST, Hold(128_000), Hold(3200), Hold(320), Hold(6400), ReleaseBeneath(1), Hold(320), Hold(6400),
        Hold(128_000), *batched, *batched, Release(4),
    )  # fmt: skip


def test_a_check_of_statuses_asks_whether_any_is_set() -> None:
    """One boolean for a batch, two for a single status."""
    check = aten._linalg_check_errors.default
    one, four = meta(dtype=torch.int32), meta(4, dtype=torch.int32)
    assert steps(check, one, "linalg.inv", out=()) == (Hold(1), 1, Release(1))
    assert steps(check, four, "linalg.inv", out=()) == (1,)


@pytest.mark.parametrize(("shape", "ops"), [((48, 16), (4,)), ((2, 48, 16), (4,)), ((4, 16, 16), POINTERS)])
def test_reflections_take_a_status_or_pointers(shape: tuple[int, ...], ops: tuple[Op, ...]) -> None:
    """cuBLAS factors a batch of small matrices; the product of the reflections takes a status."""
    factors = meta(*shape[:-1])
    assert steps(aten.geqrf.default, meta(*shape), out=(meta(*shape), factors)) == (REST, *ops)
    assert steps(aten.linalg_householder_product.default, meta(48, 16), meta(16)) == (REST, 4)


def test_cholesky_factors_are_solved_in_a_copy_or_by_triangles() -> None:
    """A single matrix is copied; a batch takes two triangular solves, of large matrices one by one."""
    copied = (Hold(4), 16_384, Release(1))
    assert steps(aten.linalg_cholesky_ex.default, meta(64, 64)) == (REST,)
    assert steps(aten.linalg_cholesky_ex.default, meta(4, 64, 64)) == (REST, 32)
    assert steps(aten.cholesky_inverse.default, meta(64, 64)) == (REST, Hold(16_384), *copied)
    assert steps(aten.cholesky_solve.default, meta(64, 3), meta(64, 64)) == (REST, *copied)
    assert steps(aten.cholesky_solve.default, meta(4, 64, 3), meta(4, 64, 64)) == (
        REST, UseCublas(), UseCublas(),
    )  # fmt: skip
    assert steps(aten.cholesky_inverse.default, meta(4, 16, 16)) == (
        REST, Hold(4096), *POINTERS, *POINTERS,
    )  # fmt: skip


def test_eigenvectors_are_made_before_eigenvalues() -> None:
    """Without vectors they are computed in a copy; the statuses are checked by the kernel."""
    checked = (Hold(4), Hold(1), 1, Release(1))
    assert steps(aten._linalg_eigh.default, meta(64, 64)) == (Output(1), OUTPUT, *checked)
    assert steps(aten._linalg_eigh.default, meta(64, 64), "L", False) == (REST, Hold(16_384), *checked)


def test_singular_values_take_memory_for_vectors_that_are_not_returned() -> None:
    """Of one matrix, or of a whole batch of matrices up to 32 x 32."""
    svd = aten._linalg_svd.default
    checked = (Hold(1), 1, Release(1))
    assert steps(svd, meta(48, 16)) == (OUTPUT, Output(1), OUTPUT, Hold(4), 3072, *checked)
    assert steps(svd, meta(48, 16), False, False) == (
        REST, Hold(4), Hold(3072), Hold(3072), 1024, Release(2), *checked,
    )  # fmt: skip
    assert steps(svd, meta(9, 40, 40), False, False) == (
        REST, Hold(36), Hold(57_600), Hold(6400), 6400, Release(2), 1,
    )  # fmt: skip
    assert steps(svd, meta(40, 8, 8), False, False) == (
        REST, Hold(160), Hold(10_240), Hold(10_240), 10_240, Release(2), 1,
    )  # fmt: skip
    batch = meta(9, 16, 32)
    in_copy = OUTPUT, Output(1), OUTPUT, Hold(36)
    assert steps(svd, batch) == (*in_copy, Hold(18_432), 36_864, Release(1), 1)  # 9 matrices of 32 x 32
    assert steps(svd, batch, True) == (*in_copy, 18_432, 1)


@pytest.mark.parametrize(
    ("shape", "ops"),
    [
        ((4, 32, 16), (Hold(8192), *POINTERS, Release(1), OUTPUT)),
        ((4, 16, 16), (Hold(4096), *POINTERS, Release(1))),
        ((2, 300, 200), (Hold(1600), 4, 4, UseCublas(), Release(1), OUTPUT)),
        ((4, 16, 32), (Hold(256), Hold(8192), *POINTERS, *POINTERS, 4, Release(2))),
        ((2, 200, 300), (Hold(1600), Hold(480_000), 4, UseCublas(), 4, Release(2))),
    ],
)
def test_least_squares_are_solved_in_copies(shape: tuple[int, ...], ops: tuple[Op, ...]) -> None:
    """As on an emulated L4; residuals are made before the copy is freed."""
    batch, rows, columns = shape
    right, empty = meta(batch, rows, 8), meta(0)
    out = meta(batch, columns, 8), meta(batch, 8) if rows > columns else empty, empty, empty
    copy = Hold(4 * batch * rows * columns)
    assert steps(aten.linalg_lstsq.default, meta(*shape), right, out=out) == (
        Hold(4 * batch), OUTPUT, copy, *ops, Release(1), 1,
    )  # fmt: skip
