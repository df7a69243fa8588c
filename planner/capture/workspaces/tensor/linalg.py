"""Workspace rules of factorizations, determinants and solves.

They include temporaries of torch's kernels. Sources: ATen/native/cuda/linalg/BatchLinearAlgebra.cpp and
BatchLinearAlgebraLib.cpp, with the default backend of builds without MAGMA. Work areas of cuSOLVER are left
out: no rule gives their sizes, and emulated runs take none.
"""

from collections.abc import Iterable
from math import prod

from torch import Tensor

from planner.capture.workspaces._rule import argument, contiguous_copies, tensor_bytes
from planner.capture.workspaces.ops import (
    Args,
    Hold,
    Ops,
    Output,
    Outputs,
    Release,
    ReleaseBeneath,
    Rule,
    UseCublas,
)
from planner.program import LEFT_OUT_NOTE, Target

# bytes of a pointer to a matrix, of a status, of a pivot, of an entry of a permutation
_POINTER, _INFO, _PIVOT, _INDEX = 8, 4, 4, 8
_CUSOLVER = (
    "_linalg_det", "_linalg_slogdet", "linalg_lu_factor_ex", "linalg_lu_solve", "linalg_qr", "geqrf",
    "linalg_householder_product", "linalg_inv_ex", "_linalg_solve_ex", "linalg_cholesky_ex",
    "cholesky_inverse", "cholesky_solve", "_linalg_eigh", "_linalg_svd", "linalg_lstsq",
)  # fmt: skip


def notes_on_factorizations(operators: Iterable[str]) -> tuple[str, ...]:
    """Return a note on cuSOLVER's work areas, or () if no operator is a factorization."""
    if not any(name.startswith(tuple(f"aten.{one}" for one in _CUSOLVER)) for name in operators):
        return ()
    return (LEFT_OUT_NOTE + "work areas of cuSOLVER's factorizations, which emulated runs leave out too",)


def _batch(matrices: Tensor) -> int:
    return prod(matrices.shape[:-2])


def _batched(batch: int) -> Ops:
    """Return the ops of a batched cuBLAS call: two arrays of `batch` pointers, then the call.

    The arrays point to the matrices of the two operands, and are freed after the call.
    """
    return (Hold(_POINTER * batch), Hold(_POINTER * batch), UseCublas(), Release(2))


def _triangular(batch: int, size: int) -> Ops:
    """Return the ops of `triangular_solve_kernel`: cuBLAS in a batch, or in turn for few large matrices."""
    return (UseCublas(),) if batch <= 8 and size >= 64 else _batched(batch)


def _factor(matrices: Tensor) -> Ops:
    """Return the ops of `lu_factor`, or () if cuBLAS does not factor the matrices.

    They hold pointers to the matrices of a batch. The sizes are those at which an emulated run of torch 2.13
    changes to cuSOLVER.
    """
    rows, columns, batch = *matrices.shape[-2:], _batch(matrices)
    if rows != columns or batch == 1 or not (rows <= 16 or (rows <= 128 and batch <= 16)):
        return ()
    return (Hold(_POINTER * batch), UseCublas(), Release(1))


def _factors(args: Args, out: tuple[Tensor, ...], target: Target) -> Ops:
    return (Outputs(), *_factor(args[0]))


def _sign_of_permutation(matrices: Tensor) -> Ops:
    """Return the ops of the sign of a permutation: temporaries to count the pivots that move a row.

    Source: `lu_det_P`, ATen/native/LinearAlgebraUtils.h.
    """
    size, batch = matrices.shape[-1], _batch(matrices)
    return (
        Hold(_INDEX * batch),
        Hold(4 * size),
        Hold(size * batch),
        _INDEX * size * batch,
        Release(2),
    )


def _determinant(args: Args, out: tuple[Tensor, ...], target: Target) -> Ops:
    matrices = args[0]
    info = Hold(_INFO * _batch(matrices))
    return (Outputs(), info, *_factor(matrices), *_sign_of_permutation(matrices), out[0].nbytes)


def _log_determinant(args: Args, out: tuple[Tensor, ...], target: Target) -> Ops:
    matrices = args[0]
    diagonal = matrices.element_size() * _batch(matrices) * matrices.shape[-1]
    return (
        Outputs(),
        Hold(_INFO * _batch(matrices)),
        *_factor(matrices),
        *_sign_of_permutation(matrices),
        Hold(diagonal),
        out[0].nbytes,
        Release(2),
        diagonal,
    )


def _solve(args: Args, out: Tensor, target: Target) -> Ops:
    columns = out.shape[-1 if argument(args, 3, True) else -2]
    solve = _solve_factored(_batch(out), args[0].shape[-1], columns, out.nbytes, argument(args, 4, False))
    return (Outputs(), *solve)


def _solve_factored(batch: int, size: int, columns: int, out_bytes: int, adjoint: bool) -> Ops:
    """Return the ops of `lu_solve_kernel`, which chooses cuSOLVER, cuBLAS or two triangular solves."""
    if size == columns:
        return _batched(batch) if size <= 16 else _two_solves(batch, size, out_bytes, adjoint)
    if 8 < size <= 64 and batch <= 2 and (columns <= 64 or adjoint or size <= 32):
        return (_INFO,)
    if 64 < size <= 128 and batch <= 2 and columns <= 2:
        return (_INFO,)
    few = size <= 8 or (size <= 64 and columns <= 8) or (size <= 128 and columns <= 2)
    return _batched(batch) if few else _two_solves(batch, size, out_bytes, adjoint)


def _two_solves(batch: int, size: int, out_bytes: int, adjoint: bool) -> Ops:
    numbers, permutation = Hold(_INDEX * size), Hold(_INDEX * size * batch)
    # a single matrix is permuted by the numbers themselves
    permutations = (numbers, permutation, ReleaseBeneath(1)) if batch > 1 else (permutation,)
    solves = (*_triangular(batch, size), *_triangular(batch, size))
    if adjoint:
        return (*permutations, *solves, out_bytes, Release(1))
    return (*permutations, numbers, permutation, Hold(out_bytes), *solves, Release(4))


def _solve_equations(args: Args, out: tuple[Tensor, ...], target: Target) -> Ops:
    """Return the ops of `_linalg_solve_ex`: the outputs, a factorization of the matrices, and a solve.

    The factors, and the permutation, are outputs. A vector is solved in a copy.
    """
    matrices, right = args[:2]
    is_left, result = argument(args, 2, True), out[0]
    batch, size = _batch(matrices), matrices.shape[-1]
    is_vector = right.dim() == 1 or right.shape == matrices.shape[:-1]
    columns = 1 if is_vector else result.shape[-1 if is_left else -2]
    copy = (Hold(tensor_bytes(result)),) if is_vector else ()
    solve = _solve_factored(batch, size, columns, tensor_bytes(result), not is_left)
    return (Outputs(), *_factor(matrices), *copy, *solve)


def _inverse(args: Args, out: tuple[Tensor, ...], target: Target) -> Ops:
    """Return the ops of an inverse: a factorization in a copy, and a solve for the identity in the output.

    Source: BatchLinearAlgebra.cpp, `linalg_inv_ex_out`.
    """
    matrices = args[0]
    batch, size = _batch(matrices), matrices.shape[-1]
    copy_bytes = tensor_bytes(matrices)
    factors, pivots = Hold(copy_bytes), Hold(_PIVOT * size * batch)
    solve = _solve_factored(batch, size, size, copy_bytes, adjoint=False)
    return (Outputs(), factors, pivots, *_factor(matrices), *solve)


def _check_statuses(statuses: int) -> Ops:
    """Return the ops of `_linalg_check_errors`, which asks whether any status is not zero."""
    return (Hold(1), 1, Release(1)) if statuses == 1 else (1,)


def _check(args: Args, out: None, target: Target) -> Ops:
    return _check_statuses(args[0].numel())


def _triangular_solve(args: Args, out: Tensor, target: Target) -> Ops:
    return (Outputs(), *_triangular(_batch(out), args[0].shape[-1]))


def _orthogonal(args: Args, out: tuple[Tensor, ...], target: Target) -> Ops:
    """Return the ops of a QR factorization: outputs, factors, and a copy if it can run in neither Q nor R.

    The factorization runs in Q or R, whichever has the matrices' shape, or in a copy if neither has that
    shape (BatchLinearAlgebra.cpp, `linalg_qr_out`). Then Q is made in place.
    """
    matrices, (q, r) = args[0], out
    rows, columns = matrices.shape[-2:]
    batch = _batch(matrices)
    has_q = argument(args, 1, "reduced") != "r"
    fits = (has_q and q.shape[-1] == columns) or r.shape[-2] == rows
    copy = () if fits else (Hold(matrices.nbytes),)
    factors = Hold(matrices.element_size() * batch * min(rows, columns))
    return (Outputs(), factors, *copy, *_reflect(matrices), *((_INFO,) if has_q else ()))


def _reflect(matrices: Tensor) -> Ops:
    """Return the ops of `geqrf_kernel`: cuBLAS's pointers for many small matrices, else a status."""
    return _batched(_batch(matrices)) if _is_batch_of_small(matrices) else (_INFO,)


def _is_batch_of_small(matrices: Tensor) -> bool:
    rows = matrices.shape[-2]
    return rows <= 256 and _batch(matrices) >= max(2, rows // 16)


def _reflections(args: Args, out: tuple[Tensor, ...], target: Target) -> Ops:
    return (Outputs(), *_reflect(args[0]))


def _least_squares(args: Args, out: tuple[Tensor, ...], target: Target) -> Ops:
    """Return the ops of `linalg_lstsq`: a factorization in a copy, and a triangular solve in the solutions.

    Many small matrices without more columns than rows are solved by cuBLAS in another copy. Matrices with
    more columns than rows are transposed in another copy. Source: `linalg_lstsq_gels`.
    """
    matrices = args[0]
    rows, columns = matrices.shape[-2:]
    batch = _batch(matrices)
    size, copy = min(rows, columns), Hold(tensor_bytes(matrices))
    factors = Hold(matrices.element_size() * batch * size)
    if rows < columns:
        solve = (factors, copy, *_reflect(matrices.mT), *_triangular(batch, size), _INFO, Release(2))
    elif _is_batch_of_small(matrices):
        solve = (copy, *_batched(batch), Release(1))
    else:
        solve = (factors, _INFO, _INFO, *_triangular(batch, size), Release(1))
    residuals = (Output(),) if rows > columns else ()
    return (Hold(_INFO * batch), Output(), copy, *solve, *residuals, Release(1), *_check_statuses(batch))


def _product_of_reflections(args: Args, out: Tensor, target: Target) -> Ops:
    return (Outputs(), *contiguous_copies(args[1]), _INFO)


def _cholesky(args: Args, out: tuple[Tensor, ...], target: Target) -> Ops:
    """Return the ops of a Cholesky factorization: pointers to the matrices of a batch."""
    batch = _batch(args[0])
    return (Outputs(), _POINTER * batch) if batch > 1 else (Outputs(),)


def _solve_cholesky(matrices: Tensor) -> Ops:
    """Return the ops of `_cholesky_solve_helper`: a copy of a single matrix, or two triangular solves."""
    batch, size = _batch(matrices), matrices.shape[-1]
    if batch == 1:
        return (Hold(_INFO), tensor_bytes(matrices), Release(1))
    return (*_triangular(batch, size), *_triangular(batch, size))


def _inverse_of_cholesky(args: Args, out: Tensor, target: Target) -> Ops:
    """Return the ops of `cholesky_inverse`: the output, a copy, and a solve for the identity."""
    return (Outputs(), Hold(tensor_bytes(args[0])), *_solve_cholesky(args[0]))


def _cholesky_solution(args: Args, out: Tensor, target: Target) -> Ops:
    return (Outputs(), *_solve_cholesky(args[1]))


def _eigenvectors(args: Args, out: tuple[Tensor, ...], target: Target) -> Ops:
    """Return the ops of `_linalg_eigh`: outputs, a copy if no eigenvectors are needed, and statuses."""
    matrices = args[0]
    batch = _batch(matrices)
    has_vectors = argument(args, 2, True)
    rest = (Hold(_INFO * batch), *_check_statuses(batch))
    if has_vectors:
        return (Output(1), Output(), *rest)
    return (Outputs(), Hold(tensor_bytes(matrices)), *rest)


def _singular_values(args: Args, out: tuple[Tensor, ...], target: Target) -> Ops:
    """Return the ops of `_linalg_svd`: outputs, statuses, a copy, and memory for unneeded vectors.

    Small matrices are factored as a batch, with all vectors of the longer side, also where fewer are asked
    for. Without vectors, cuSOLVER still gets memory for vectors: of all matrices of a batch if the matrices
    are small, otherwise of one matrix.
    """
    matrices = args[0]
    rows, columns = matrices.shape[-2:]
    batch = _batch(matrices)
    info, copy_bytes = Hold(_INFO * batch), tensor_bytes(matrices)
    most = max(rows, columns)
    if argument(args, 2, True):
        copy: Ops = (copy_bytes,)
        if most <= 32 and rows != columns and not argument(args, 1, False):
            copy = (Hold(copy_bytes), batch * most * most * matrices.element_size(), Release(1))
        return (Output(), Output(1), Output(), info, *copy, *_check_statuses(batch))
    count = batch if most <= 32 else 1
    unit = count * matrices.element_size() * min(rows, columns)
    vectors = (Hold(unit * rows), unit * columns)
    return (Outputs(), info, Hold(copy_bytes), *vectors, Release(2), *_check_statuses(batch))


RULES: dict[str, Rule] = {
    "linalg_qr": _orthogonal,
    "geqrf": _reflections,
    "linalg_householder_product": _product_of_reflections,
    "linalg_inv_ex": _inverse,
    "_linalg_solve_ex": _solve_equations,
    "_linalg_check_errors": _check,
    "linalg_cholesky_ex": _cholesky,
    "cholesky_inverse": _inverse_of_cholesky,
    "cholesky_solve": _cholesky_solution,
    "_linalg_eigh": _eigenvectors,
    "_linalg_svd": _singular_values,
    "linalg_lstsq": _least_squares,
    "linalg_lu_factor_ex": _factors,
    "_linalg_det": _determinant,
    "_linalg_slogdet": _log_determinant,
    "linalg_lu_solve": _solve,
    "linalg_solve_triangular": _triangular_solve,
}
