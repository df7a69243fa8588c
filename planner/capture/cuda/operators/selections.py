"""Compute gradients of operators that select elements, as on CUDA.

The gradient is scattered into zeros in place. The operators are `gather`, `index_select`, `masked_select`,
`sort`, `topk`, `max` over a dimension and the like. For meta tensors or under a dispatch mode
(TensorSubclassLikeUtils.h) ATen scatters out of place, which would cost a second tensor of the input's size
(ATen/native: TensorAdvancedIndexing.cpp, ReduceOps.cpp, TriangularOps.cpp).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _gather(grad: Tensor, x: Tensor, dim: int, index: Tensor, sparse_grad: bool) -> Any:
    if sparse_grad:
        return aten._gather_sparse_backward(x, dim, index, grad)
    return grad.new_zeros(x.shape).scatter_add_(dim, index, grad)


def _index_select(grad: Tensor, sizes: Sequence[int], dim: int, index: Tensor) -> Any:
    return grad.new_zeros(sizes).index_add_(dim, index, grad)


def _masked_select(grad: Tensor, x: Tensor, mask: Tensor) -> Any:
    both = torch.broadcast_shapes(x.shape, mask.shape)  # type: ignore[no-untyped-call]
    return torch.zeros_like(x.expand(both)).masked_scatter_(mask, grad)


def _selected_values(grad: Tensor, dim: int, indices: Tensor, sizes: Sequence[int], keepdim: bool) -> Any:
    if not keepdim and len(sizes):
        grad, indices = grad.unsqueeze(dim), indices.unsqueeze(dim)
    return grad.new_zeros(sizes).scatter_(dim, indices, grad)


def _running_extremes(grad: Tensor, x: Tensor, indices: Tensor, dim: int) -> Any:
    return x.new_zeros(x.shape).scatter_add_(dim, indices, grad) if x.numel() else x


def _trace(grad: Tensor, sizes: Sequence[int]) -> Any:
    rows, columns = sizes
    step = columns + 1
    zeros = grad.new_zeros(rows * columns)
    places = torch.arange(0, min(rows, columns) * step, step, device=grad.device)
    return zeros.index_fill_(0, places, grad).view(rows, columns)


KERNELS: Mapping[str, Callable[..., Any]] = {
    "gather_backward": _gather,
    "index_select_backward": _index_select,
    "masked_select_backward": _masked_select,
    "value_selecting_reduction_backward": _selected_values,
    "cummaxmin_backward": _running_extremes,
    "trace_backward": _trace,
}
