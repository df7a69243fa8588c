"""Workspace rules of factorizations, determinants and solves.

They include temporaries of torch's kernels. Sources: ATen/native/cuda/linalg/BatchLinearAlgebra.cpp and
BatchLinearAlgebraLib.cpp, with the default backend of builds without MAGMA. Work areas of cuSOLVER are left
out: no rule gives their sizes, and emulated runs take none.
"""

from collections.abc import Iterable
from math import prod

from torch import Tensor

from planner.capture.workspaces._rule import argument
from planner.capture.workspaces.ops import Args, Hold, Ops, Outputs, Release, Rule, UseCublas
from planner.program import LEFT_OUT_NOTE, Target

_POINTER, _INFO, _INDEX = 8, 4, 8  # bytes of a pointer to a matrix, of a status, of an entry of a permutation
_CUSOLVER = ("_linalg_det", "_linalg_slogdet", "linalg_lu_factor_ex", "linalg_lu_solve", "linalg_qr")


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
    """Return the ops of `triangular_solve_kernel`. It solves few large matrices one after another."""
    return (UseCublas(),) if batch <= 8 and size >= 64 else _batched(batch)


def _factor(matrices: Tensor) -> Ops:
    """Return the ops of `lu_factor`, or () if cuBLAS does not factor the matrices.

    They hold pointers to the matrices of a batch.
    """
    rows, columns, batch = *matrices.shape[-2:], _batch(matrices)
    if rows != columns or batch == 1 or rows >= 512:
        return ()
    return (Hold(_POINTER * batch), UseCublas(), Release(1))


def _factors(args: Args, out: tuple[Tensor, ...], target: Target) -> Ops:
    return (Outputs(), *_factor(args[0]))


def _sign_of_permutation(matrices: Tensor) -> Ops:
    """Return the ops of the sign of a permutation.

    torch counts the pivots that move a row. Source: `lu_det_P`, ATen/native/LinearAlgebraUtils.h.
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
    """Return the ops of `lu_solve_kernel`. It chooses cuSOLVER, cuBLAS or two triangular solves."""
    factors, adjoint = args[0], argument(args, 4, False)
    batch, size = _batch(out), factors.shape[-1]
    columns = out.shape[-1 if argument(args, 3, True) else -2]
    if size == columns:
        return (Outputs(), *(_batched(batch) if size <= 16 else _two_solves(out, size, adjoint)))
    if 8 < size <= 64 and batch <= 2 and (columns <= 64 or adjoint or size <= 32):
        return (Outputs(), _INFO)
    if 64 < size <= 128 and batch <= 2 and columns <= 2:
        return (Outputs(), _INFO)
    few = size <= 8 or (size <= 64 and columns <= 8) or (size <= 128 and columns <= 2)
    return (Outputs(), *(_batched(batch) if few else _two_solves(out, size, adjoint)))


def _two_solves(out: Tensor, size: int, adjoint: bool) -> Ops:
    batch = _batch(out)
    permutation = Hold(_INDEX * size * batch)
    solves = (*_triangular(batch, size), *_triangular(batch, size))
    if adjoint:
        return (permutation, *solves, out.nbytes, Release(1))
    numbers = Hold(_INDEX * size)
    return (permutation, numbers, permutation, Hold(out.nbytes), *solves, Release(4))


def _triangular_solve(args: Args, out: Tensor, target: Target) -> Ops:
    return (Outputs(), *_triangular(_batch(out), args[0].shape[-1]))


def _orthogonal(args: Args, out: tuple[Tensor, ...], target: Target) -> Ops:
    """Return the ops of a QR factorization.

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
    are_small = rows <= 256 and batch >= max(2, rows // 16)  # whether cuBLAS factors them
    factor = _batched(batch) if are_small else (_INFO,)
    return (Outputs(), factors, *copy, *factor, *((_INFO,) if has_q else ()))


RULES: dict[str, Rule] = {
    "linalg_qr": _orthogonal,
    "linalg_lu_factor_ex": _factors,
    "_linalg_det": _determinant,
    "_linalg_slogdet": _log_determinant,
    "linalg_lu_solve": _solve,
    "linalg_solve_triangular": _triangular_solve,
}
