"""Implementations of operators that ATen computes with other operators beneath autograd.

Dispatch modes do not see the other operators. The norms of several tensors are included, as one kernel with a
workspace.
"""

from collections.abc import Callable, Sequence
from math import inf, prod
from typing import Any

import torch
from torch import Tensor

from planner.capture.meta_kernels.strides import is_dense

aten = torch.ops.aten
# ATen/native/cuda/MultiTensorApply.cuh: elements that a block of threads works on.
_CHUNK = 65_536
_HALVES = (torch.float16, torch.bfloat16)  # accumulated in float32 (ATen/OpMathType.h)


def _affine_grid_generator(theta: Tensor, size: Sequence[int], align_corners: bool) -> Tensor:
    """Return the sampling grid of an affine transformation, a product of base coordinates and `theta`.

    Source: AffineGridGenerator.cpp.
    """
    samples, *extents = size[0], *size[2:]
    rank = len(extents)
    base = theta.new_empty((samples, *extents, rank + 1))
    for number, extent in enumerate(reversed(extents)):
        place = base.select(-1, number)
        place.copy_(_from_minus_one(theta, extent, align_corners).view(-1, *[1] * number))
    base.select(-1, rank).fill_(1)
    grid = base.view(samples, prod(extents), rank + 1).bmm(theta.transpose(1, 2))
    return grid.view(samples, *extents, rank)


def _from_minus_one(theta: Tensor, count: int, align_corners: bool) -> Tensor:
    if count <= 1:
        return theta.new_zeros(())
    steps = torch.linspace(-1, 1, count, dtype=theta.dtype, device=theta.device)
    return steps if align_corners else steps * (count - 1) / count


def _trilinear(
    x: Tensor, y: Tensor, z: Tensor, expand_x: list[int], expand_y: list[int], expand_z: list[int],
    summed: list[int], unrolled: int = 1,
) -> Tensor:  # fmt: skip
    """Return the product of three tensors summed over dimensions `summed`, slice by slice of `unrolled`.

    Source: Linear.cpp.
    """
    rank = x.dim() + len(expand_x)
    extents: list[int] = []
    of_pair: list[int] = []
    of_last: list[int] = []
    for dim in range(rank):
        x = x.unsqueeze(dim) if dim in expand_x else x
        y = y.unsqueeze(dim) if dim in expand_y else y
        z = z.unsqueeze(dim) if dim in expand_z else z
        if dim in summed and dim != unrolled:
            (of_pair if dim in expand_z else of_last).append(dim)
        extents.append(max(x.shape[dim], y.shape[dim], z.shape[dim]))
    out = x.new_zeros([1 if dim in summed else extent for dim, extent in enumerate(extents)])

    def sliced(tensor: Tensor, expanded: list[int], number: int) -> Tensor:
        return tensor.narrow(unrolled, 0 if unrolled in expanded else number, 1)

    def add(number: int) -> None:
        part = _sum_of_products(sliced(x, expand_x, number), sliced(y, expand_y, number), of_pair)
        part = _sum_of_products(part, sliced(z, expand_z, number), of_last)
        (out if unrolled in summed else out.narrow(unrolled, number, 1)).add_(part)

    if x.numel() and y.numel() and z.numel():
        for number in range(extents[unrolled]):
            add(number)
    return out.squeeze([dim for dim in range(rank) if dim in summed])


def _sum_of_products(left: Tensor, right: Tensor, summed: list[int]) -> Tensor:
    """Return the product of two tensors, summed over the dimensions `summed`.

    `bmm` computes it, and the summed dimensions get size 1 (sumproduct_pair).
    """
    if not summed:
        return left * right
    both: list[int] = []
    of_left: list[int] = []
    of_right: list[int] = []
    for dim in range(left.dim()):
        in_left, in_right = left.shape[dim] != 1, right.shape[dim] != 1
        if dim not in summed:
            (both if in_left and in_right else of_left if in_left else of_right).append(dim)
        elif in_left is not in_right:
            left = left.sum(dim, True) if in_left else left
            right = right.sum(dim, True) if in_right else right
    sizes = [prod(left.shape[dim] for dim in dims) for dims in (both, of_left, summed)]
    columns = prod(right.shape[dim] for dim in of_right)
    order = [*both, *of_left, *summed, *of_right]
    rows = left.permute(order).reshape(sizes)
    product = rows.bmm(
        right.permute(*both, *summed, *of_right, *of_left).reshape(sizes[0], sizes[2], columns)
    )
    shape = [1 if dim in summed else max(left.shape[dim], right.shape[dim]) for dim in order]
    return product.view(shape).permute([order.index(dim) for dim in range(left.dim())])


def _foreach_norm(
    tensors: Sequence[Tensor], ord: float = 2, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Return the norm of each tensor, with the workspace of CUDA's kernel if one kernel computes all norms.

    Source: ATen/native/cuda/ForeachReduceOp.cu. Partial results of each chunk are allocated first, for each
    tensor as many as the largest tensor needs. They are freed after the norms are made, each of which is a
    separate tensor. If one kernel cannot compute all norms, each norm is computed separately.
    """
    first = tensors[0]
    if not _is_fast(tensors, ord):
        return [torch.linalg.vector_norm(tensor, ord, dtype=dtype) for tensor in tensors]
    out = dtype or first.dtype
    chunks = max(-(-tensor.numel() // _CHUNK) for tensor in tensors)
    accumulated = torch.float32 if out in _HALVES else out
    partial = torch.zeros(len(tensors) * chunks, dtype=accumulated, device=first.device)
    norms = [torch.empty((), dtype=out, device=first.device) for _ in tensors]
    del partial
    return norms


def _is_fast(tensors: Sequence[Tensor], ord: float) -> bool:
    """Return whether one kernel computes the norms of all tensors.

    This is `can_use_fast_route` (ATen/native/ForeachUtils.h).
    """
    first = tensors[0]
    alike = all(tensor.dtype == first.dtype and tensor.device == first.device for tensor in tensors)
    dense = all(is_dense(tensor.shape, tensor.stride()) for tensor in tensors)
    return alike and dense and first.is_floating_point() and ord in (1, 2, inf)


def _matrix_exp(x: Tensor) -> Tensor:
    """Return the exponential of matrices, computed as for matrices whose norm is large.

    Source: ATen/native/LinearAlgebra.cpp, `mexp_impl`. Each matrix is approximated by a polynomial, whose
    degree depends on the matrix's norm. The values of meta tensors are unknown, so all matrices get the
    highest degree, which takes the most memory. On a GPU, a matrix of a norm above 1.46 gets this degree.
    """
    size = x.shape[-1]
    if size <= 1:
        return x.exp() if size else x.clone()
    matrices = x.view(-1, size, size)
    norm = _largest_sum_of_column(matrices)
    result = torch.empty_like(matrices, memory_format=torch.contiguous_format)
    chosen = torch.empty(len(matrices), dtype=torch.int64, device=x.device)
    large = matrices.index_select(0, chosen)
    squarings = norm.index_select(0, chosen).log2().ceil().to(torch.int64).view(-1, 1, 1)
    scaled = large / (2**squarings)
    exponentials = _polynomial_of_degree_18(scaled)
    squares = exponentials.bmm(exponentials)
    squares = squares.bmm(squares)
    result.index_put_((chosen,), squares)
    del squares, exponentials, scaled, squarings, large, chosen, norm
    return result.view(x.shape)


def _largest_sum_of_column(matrices: Tensor) -> Tensor:
    magnitudes = matrices.abs()
    sums = magnitudes.sum(-2)
    largest = sums.max(-1)[0]
    del sums, magnitudes
    return largest


def _polynomial_of_degree_18(matrices: Tensor) -> Tensor:
    """Return a polynomial of degree 18 of each matrix (`compute_T18`).

    The powers 0, 1, 2, 3 and 6 are combined to five matrices, one of which becomes the result.
    """
    coefficients = torch.empty(5, 5, dtype=matrices.dtype.to_real(), device=matrices.device)
    powers = matrices.new_empty((5, *matrices.shape))
    one = matrices.new_ones(1)
    powers[0].copy_(one.expand(matrices.shape[:-1]).diag_embed())
    del one
    powers[1].copy_(matrices)
    for power, left, right in ((2, 1, 1), (3, 1, 2), (4, 3, 3)):
        torch.bmm(powers[left], powers[right], out=powers[power])
    sums = torch.zeros_like(powers)
    sums[3].add_(torch.bmm(sums[0], sums[4], out=powers[0]))
    sums[2].add_(sums[3])
    product = torch.bmm(sums[2], sums[3], out=powers[0])
    result = sums[1].add_(product)
    del product, powers, coefficients
    return result


def _pinv(
    x: Tensor, *, atol: Tensor | None = None, rtol: Tensor | None = None, hermitian: bool = False
) -> Tensor:
    """Return the pseudoinverse of matrices, from their singular values or eigenvalues.

    Source: ATen/native/LinearAlgebra.cpp, `linalg_pinv`.
    """
    absolute = x.new_zeros((), dtype=torch.float64) if atol is None else atol
    relative = _default_rtol(x, atol) if rtol is None else rtol
    if hermitian:
        values, left = aten._linalg_eigh(x)
        right, sizes = left, values.abs()
        largest = sizes.amax(-1, True)
    else:
        left, values, adjoint = aten._linalg_svd(x)
        right, sizes, largest = adjoint.mH, values, values[..., :1]
    tolerance = torch.maximum(absolute.unsqueeze(-1), relative.unsqueeze(-1) * largest)
    inverses = _inverses_above(values, sizes, tolerance).to(x.dtype)
    scaled: Tensor = right * inverses.unsqueeze(-2)
    result = _product(scaled, left.mH)
    del scaled, inverses, tolerance
    return result


def _product(left: Tensor, right: Tensor) -> Tensor:
    if left.dim() == 2:
        return left.mm(right)
    product = left.flatten(0, -3).bmm(right.flatten(0, -3))
    return product.view(*left.shape[:-1], right.shape[-1])


def _default_rtol(x: Tensor, atol: Tensor | None) -> Tensor:
    """Return the relative tolerance of a pseudoinverse, or 0 where the absolute tolerance is positive."""
    rtol = x.new_full((), torch.finfo(x.dtype).eps * max(x.shape[-2:]), dtype=torch.float64)
    return rtol if atol is None else torch.where(atol > 0, 0.0, rtol)


def _inverses_above(values: Tensor, sizes: Tensor, tolerance: Tensor) -> Tensor:
    """Return the reciprocals of values whose sizes are above the tolerance, and 0 for others."""
    zero = values.new_zeros(())
    reciprocals = values.reciprocal()
    is_above = sizes > tolerance
    inverses = torch.where(is_above, reciprocals, zero)
    del is_above, reciprocals, zero
    return inverses


COMPOSED: dict[Any, Callable[..., Any]] = {
    aten._foreach_norm.Scalar: _foreach_norm,
    aten.affine_grid_generator.default: _affine_grid_generator,
    aten._trilinear.default: _trilinear,
    aten.linalg_matrix_exp.default: _matrix_exp,
    aten.linalg_pinv.atol_rtol_tensor: _pinv,
}
