"""Outputs of frequent operators on `meta`, without the detour through torch's Python decompositions.

torch's own meta kernels answer the same, but many of them are decompositions in Python: a multiplication
takes a tenth of a millisecond there and batch norm a whole one, which is most of a trace. Each shortcut
returns tensors of the shape, dtype and strides of torch's kernel, or NotImplemented for a case that it does
not cover; `tests/test_shapes.py` holds them against torch's. Where CUDA lays out its results otherwise than
torch's meta kernels, the rule stands in `cuda/layouts.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from planner.events import Phase
from planner.trace.cuda import layouts, rnn
from planner.trace.strides import LAST, broadcast, contiguous, is_plain, new, pointwise_strides

aten = torch.ops.aten


# ---- pointwise operators


def _pointwise(*operands: Any, dtype: torch.dtype | None = None, **_: Any) -> Any:
    """One output over all operands, floating-point tensors of one dtype, broadcast or not.

    Operands that are no tensors are taken for numbers, which decide nothing here. `dtype` is that of the
    output where it is not the operands'.
    """
    tensors = [operand for operand in operands if isinstance(operand, Tensor)]
    kind = tensors[0].dtype
    if not kind.is_floating_point or any(t.dtype is not kind for t in tensors):
        return NotImplemented
    if any(isinstance(operand, complex) for operand in operands):
        return NotImplemented
    return _over(tensors, dtype or kind)


def _over(tensors: Sequence[Tensor], dtype: torch.dtype) -> Any:
    """An output of this dtype over these operands, laid out as by ATen/TensorIterator.cpp."""
    if not all(t.is_meta for t in tensors):
        return NotImplemented
    shape: Sequence[int] = tensors[0].shape
    if any(t.shape != shape for t in tensors):
        common = broadcast([t.shape for t in tensors])
        if common is None:
            return NotImplemented  # torch's own kernel words the error
        shape = common
    if 0 in shape:
        return NotImplemented
    strides = [t.stride() if t.shape == shape else t.expand(shape).stride() for t in tensors]
    plain = contiguous(shape)
    if all(stride == plain for stride in strides):
        return new(shape, plain, dtype)
    # torch converts half precision there and back, which puts what is expanded or of size 1 in order.
    if any(t.dtype.itemsize == 2 and (0 in t.stride() or 1 in t.shape) and not is_plain(t) for t in tensors):
        return NotImplemented
    found = pointwise_strides(shape, strides)
    return NotImplemented if found is None else new(shape, found, dtype)


def _truth(x: Tensor, *numbers: Any) -> Any:
    """A comparison with a number."""
    return _pointwise(x, *numbers, dtype=torch.bool)


def _where(condition: Tensor, x: Tensor, y: Tensor) -> Any:
    if condition.dtype is not torch.bool or x.dtype is not y.dtype or not x.dtype.is_floating_point:
        return NotImplemented
    return _over((condition, x, y), x.dtype)


def _clamp(x: Tensor, low: Any = None, high: Any = None) -> Any:
    return NotImplemented if low is None and high is None else _pointwise(x, low, high)


def _derivative(grad: Tensor, x: Tensor, *numbers: Any, **options: Any) -> Any:
    """One kernel over the gradient and the input, in this order (ATen/native/Activation.cpp).

    torch's meta kernels compose several, which end in another layout where the two differ in theirs.
    """
    return _pointwise(grad, x) if grad.shape == x.shape else NotImplemented


def _threshold_backward(grad: Tensor, x: Tensor, threshold: Any) -> Any:
    """As `_derivative`, but the input comes first."""
    return _derivative(x, grad)


def _itself(x: Tensor, *numbers: Any, **_: Any) -> Any:
    """A pointwise operator in place, over one tensor."""
    if any(isinstance(number, Tensor | complex) for number in numbers):
        return NotImplemented
    return x if is_plain(x) and x.dtype.is_floating_point else NotImplemented


def _add_in_place(x: Tensor, y: Any, *, alpha: Any = 1) -> Any:
    if isinstance(y, int) and isinstance(alpha, int):  # steps and batches are counted
        return x if is_plain(x) and x.dtype in (torch.int64, torch.float32) else NotImplemented
    if not isinstance(y, Tensor) or not isinstance(alpha, int | float) or x.dtype is not y.dtype:
        return NotImplemented
    fits = is_plain(x) and y.is_meta and x.shape == y.shape and x.dtype.is_floating_point
    return x if fits else NotImplemented


# ---- reductions


def _reduced(x: Tensor, dims: Sequence[int] | None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """Contiguous, whatever the input (ATen/native/ReduceOpsUtils.h, resize_reduction)."""
    rank = x.dim()
    if not x.is_meta or not x.dtype.is_floating_point or dtype is not None or 0 in x.shape:
        return NotImplemented
    if any(not -rank <= dim < rank for dim in dims or ()):
        return NotImplemented
    gone = {dim % rank for dim in dims} if dims else set(range(rank))
    if dims and len(gone) < len(dims):
        return NotImplemented
    kept = [1 if dim in gone else size for dim, size in enumerate(x.shape) if keepdim or dim not in gone]
    return new(kept, contiguous(kept), x.dtype)


def _vector_norm(x: Tensor, order: Any = 2, *dims_and_keepdim: Any, **dtype: Any) -> Any:
    if order != 2:
        return NotImplemented
    return _reduced(x, *dims_and_keepdim, **dtype) if dims_and_keepdim else _reduced(x, None, **dtype)


# ---- products


def _mm(a: Tensor, b: Tensor) -> Any:
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0] or a.dtype is not b.dtype:
        return NotImplemented
    if not a.dtype.is_floating_point or not (a.is_meta and b.is_meta):
        return NotImplemented
    rows, columns = a.shape[0], b.shape[1]
    return new((rows, columns), (max(columns, 1), 1), a.dtype)


def _addmm(bias: Tensor, a: Tensor, b: Tensor, **_: Any) -> Any:
    if bias.dim() != 1 or bias.dtype is not a.dtype or not bias.is_meta:
        return NotImplemented
    return _mm(a, b) if b.dim() == 2 and bias.shape[0] == b.shape[1] else NotImplemented


def _bmm(a: Tensor, b: Tensor) -> Any:
    if a.dim() != 3 or b.dim() != 3 or a.shape[0] != b.shape[0] or a.shape[2] != b.shape[1]:
        return NotImplemented
    if a.dtype is not b.dtype or not a.dtype.is_floating_point or not (a.is_meta and b.is_meta):
        return NotImplemented
    shape = (a.shape[0], a.shape[1], b.shape[2])
    return NotImplemented if 0 in shape else new(shape, contiguous(shape), a.dtype)


# ---- joining and its reverse


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    """Contiguous as soon as one part is (ATen/native/TensorShape.h, cat_compute_output_memory_format)."""
    first = tensors[0]
    rank = first.dim()
    if not -rank <= dim < rank or (rank in LAST and not any(is_plain(t) for t in tensors)):
        return NotImplemented
    dim %= rank
    shape = list(first.shape)
    for t in tensors[1:]:
        if t.dim() != rank:
            return NotImplemented
        shape[dim] += t.shape[dim]
    for t in tensors:
        rest_differs = any(a != b for i, (a, b) in enumerate(zip(t.shape, shape, strict=True)) if i != dim)
        if rest_differs or t.dtype is not first.dtype or not t.is_meta or 0 in t.shape:
            return NotImplemented
    return new(shape, contiguous(shape), first.dtype)


def _select_backward(grad: Tensor, shape: Sequence[int], dim: int, index: int) -> Any:
    rank = len(shape)
    if not (-rank <= dim < rank and grad.is_meta) or 0 in shape:
        return NotImplemented
    dim %= rank
    expected = [*shape[:dim], *shape[dim + 1 :]]
    if not -shape[dim] <= index < shape[dim] or list(grad.shape) != expected:
        return NotImplemented
    return new(shape, contiguous(shape), grad.dtype)


def _slice_backward(grad: Tensor, shape: Sequence[int], dim: int, start: int, end: int, step: int) -> Any:
    rank = len(shape)
    if not (-rank <= dim < rank and grad.is_meta) or step < 1 or 0 in shape:
        return NotImplemented
    dim %= rank
    taken = len(range(*slice(start, end, step).indices(shape[dim])))
    if list(grad.shape) != [*shape[:dim], taken, *shape[dim + 1 :]]:
        return NotImplemented
    return new(shape, contiguous(shape), grad.dtype)


# ---- the rest


def _log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Any:
    fits = is_plain(x) and -x.dim() <= dim < x.dim() and not half_to_float
    return _pointwise(x) if fits else NotImplemented


def _log_softmax_backward(grad: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Any:
    fits = is_plain(grad) and is_plain(output) and grad.shape == output.shape and dtype is grad.dtype
    return _pointwise(grad, output) if fits and -grad.dim() <= dim < grad.dim() else NotImplemented


def _is_nll(x: Tensor, target: Tensor, weight: Any, reduction: int) -> bool:
    """A loss over rows of scores, summed or averaged."""
    fits = x.dim() == 2 and target.dim() == 1 and x.shape[0] == target.shape[0] and reduction in (1, 2)
    return fits and weight is None and is_plain(x) and x.dtype.is_floating_point and target.is_meta


def _nll_loss(x: Tensor, target: Tensor, weight: Any, reduction: int, ignore_index: int) -> Any:
    if not _is_nll(x, target, weight, reduction):
        return NotImplemented
    return new((), (), x.dtype), new((), (), x.dtype)


def _nll_loss_backward(
    grad: Tensor, x: Tensor, target: Tensor, weight: Any, reduction: int, ignore_index: int, total: Tensor
) -> Any:
    if not _is_nll(x, target, weight, reduction) or grad.dim() != 0 or total.dim() != 0:
        return NotImplemented
    return _pointwise(x)


def _native_dropout(x: Tensor, p: float, train: bool | None) -> Any:
    if not train or not is_plain(x) or not x.dtype.is_floating_point:
        return NotImplemented
    return _pointwise(x), _pointwise(x, dtype=torch.bool)


def _in_place(*_: Any, **__: Any) -> None:
    """An operator that only changes its arguments and has no kernel on meta."""


def _foreach_in_place(tensors: Sequence[Tensor], others: Sequence[Tensor], **_: Any) -> Any:
    """An operator in place over two lists, tensor by tensor."""
    if len(tensors) != len(others):
        return NotImplemented
    for x, y in zip(tensors, others, strict=True):
        if x.shape != y.shape or x.dtype is not y.dtype or not (x.is_meta and y.is_meta):
            return NotImplemented
    return None


SHORTCUTS: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(
        (
            aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor,
            aten.mul.Scalar, aten.div.Scalar, aten.clamp_min.default,
            aten.relu.default, aten.gelu.default, aten.silu.default, aten.sigmoid.default, aten.tanh.default,
            aten.hardtanh.default, aten.hardswish.default, aten.hardsigmoid.default,
            aten.exp.default, aten.neg.default,
        ),
        _pointwise,
    ),
    **dict.fromkeys(
        (aten.eq.Scalar, aten.ne.Scalar, aten.ge.Scalar, aten.le.Scalar, aten.gt.Scalar, aten.lt.Scalar),
        _truth,
    ),
    **dict.fromkeys(
        (
            aten.gelu_backward.default, aten.silu_backward.default, aten.sigmoid_backward.default,
            aten.tanh_backward.default, aten.hardtanh_backward.default, aten.hardswish_backward.default,
            aten.hardsigmoid_backward.default,
        ),
        _derivative,
    ),
    **dict.fromkeys(
        (aten.silu_.default, aten.hardtanh_.default, aten.hardswish_.default, aten.div_.Tensor), _itself
    ),
    aten.threshold_backward.default: _threshold_backward,
    aten.clamp.default: _clamp,
    aten.where.self: _where,
    aten.add_.Tensor: _add_in_place,
    aten.sum.dim_IntList: _reduced,
    aten.mean.dim: _reduced,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.bmm.default: _bmm,
    aten.cat.default: _cat,
    aten.select_backward.default: _select_backward,
    aten.slice_backward.default: _slice_backward,
    aten._log_softmax.default: _log_softmax,
    aten._log_softmax_backward_data.default: _log_softmax_backward,
    aten.nll_loss_forward.default: _nll_loss,
    aten.nll_loss_backward.default: _nll_loss_backward,
    aten.native_dropout.default: _native_dropout,
    aten._fused_sgd_.default: _in_place,
    aten._fused_adagrad_.default: _in_place,
    aten._foreach_add_.List: _foreach_in_place,
    **layouts.KERNELS,
    **rnn.KERNELS,
}  # fmt: skip


def run_on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], phase: Phase) -> Any:
    """What the operator gives; `phase` is the loop's."""
    shortcut = SHORTCUTS.get(func)
    if shortcut is not None:
        out = shortcut(*args, **kwargs)
        if out is not NotImplemented:
            return out
    reads = func is aten._local_scalar_dense.default and args[0].is_meta
    if reads and phase is Phase.OPTIMIZER:
        return 1.0  # optimizers read norms, which decide no memory; step counts are on the CPU
    return func(*args, **kwargs) if kwargs else func(*args)
