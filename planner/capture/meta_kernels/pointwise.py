"""Pointwise operators on `meta`: one output over all operands, laid out as by ATen/TensorIterator.cpp.

Each returns NotImplemented for a case that it does not cover; see `planner.capture.meta_kernels.reductions`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from planner.capture.meta_kernels.strides import broadcast, contiguous, is_plain, new, pointwise_strides

aten = torch.ops.aten


def over_all(*operands: Any, dtype: torch.dtype | None = None, **_: Any) -> Any:
    """One output over all operands, floating-point tensors, broadcast or not.

    Operands that are no tensors are taken for numbers, which decide nothing here. `dtype` is that of the
    output where it is not what the operands promote to.
    """
    tensors = []
    kind: torch.dtype | None = None
    for operand in operands:
        if isinstance(operand, Tensor):
            tensors.append(operand)
            if operand.dtype is not kind:
                if not operand.dtype.is_floating_point:
                    return NotImplemented
                kind = operand.dtype if kind is None else torch.result_type(*tensors[:2])
        elif isinstance(operand, complex):
            return NotImplemented
    if kind is None or (len(tensors) > 2 and any(t.dtype is not kind for t in tensors)):
        return NotImplemented
    return _laid_over(tensors, kind, dtype or kind)


def _alone(x: Any, *numbers: Any, **options: Any) -> Any:
    """Over one tensor and numbers that are no operands: CUDA puts its strides in order where they are
    unusual in dimensions of size 1 alone, which torch's meta kernels keep.
    """
    is_simple = isinstance(x, Tensor) and x.is_meta and x.dtype.is_floating_point and 0 not in x.shape
    if is_simple and x.is_contiguous() and not any(isinstance(number, complex) for number in numbers):
        return new(x.shape, contiguous(x.shape), x.dtype)
    return over_all(x, *numbers, **options)


def _laid_over(tensors: Sequence[Tensor], kind: torch.dtype, dtype: torch.dtype) -> Any:
    """An output of this dtype over these operands, which are computed with as `kind`."""
    shape: Sequence[int] = tensors[0].shape
    is_broadcast = False
    for t in tensors:
        if not t.is_meta:
            return NotImplemented
        is_broadcast = is_broadcast or t.shape != shape
    if is_broadcast:
        common = broadcast([t.shape for t in tensors])
        if common is None:
            return NotImplemented  # torch's own kernel words the error
        shape = common
    if 0 in shape or (is_broadcast and len(shape) == 4 and (shape[1] == 1 or shape[2] == shape[3] == 1)):
        return NotImplemented  # contiguous is channels_last too, and broadcasting decides which comes out
    strides = [t.stride() if t.shape == shape else t.expand(shape).stride() for t in tensors]
    plain = contiguous(shape)
    if strides.count(plain) == len(strides):
        return new(shape, plain, dtype)
    # torch converts half precision there and back, and other dtypes to the common one, which puts what is
    # expanded or of size 1 in order.
    for t in tensors:
        is_converted = t.dtype.itemsize == 2 or (t.dtype is not kind and t.dtype is not torch.bool)
        if is_converted and (0 in t.stride() or 1 in t.shape) and not is_plain(t):
            return NotImplemented
    found = pointwise_strides(shape, strides)
    return NotImplemented if found is None else new(shape, found, dtype)


def _truth(x: Tensor, *numbers: Any) -> Any:
    """A comparison with a number."""
    return over_all(x, *numbers, dtype=torch.bool)


def _where(condition: Tensor, x: Tensor, y: Tensor) -> Any:
    if condition.dtype is not torch.bool or x.dtype is not y.dtype or not x.dtype.is_floating_point:
        return NotImplemented
    return _laid_over((condition, x, y), x.dtype, x.dtype)


def _clamp(x: Tensor, low: Any = None, high: Any = None) -> Any:
    return NotImplemented if low is None and high is None else over_all(x, low, high)


def _power(x: Tensor, exponent: Any) -> Any:
    """An exponent of one is a copy, which torch lays out in another way than the other powers."""
    if isinstance(exponent, Tensor) or (exponent == 1 and not is_plain(x)):
        return NotImplemented
    return over_all(x, exponent)


def _derivative(grad: Tensor, x: Tensor, *numbers: Any, **options: Any) -> Any:
    """One kernel over the gradient and the input, in this order (ATen/native/Activation.cpp).

    torch's meta kernels compose several, which end in another layout where the two differ in theirs.
    """
    return over_all(grad, x) if grad.shape == x.shape and grad.dtype is x.dtype else NotImplemented


def _input_first(grad: Tensor, x: Tensor, *numbers: Any) -> Any:
    """As `_derivative`, but the input comes first."""
    return _derivative(x, grad)


def _elu_backward(grad: Tensor, alpha: Any, scale: Any, input_scale: Any, is_result: bool, x: Tensor) -> Any:
    return _derivative(grad, x)


def _native_dropout_backward(grad: Tensor, mask: Tensor, scale: float) -> Any:
    fits = is_plain(grad) and is_plain(mask) and grad.shape == mask.shape and mask.dtype is torch.bool
    return over_all(grad) if fits else NotImplemented


# ---- in place


def _itself(x: Tensor, *numbers: Any, **_: Any) -> Any:
    """A pointwise operator in place, over one tensor."""
    if any(isinstance(number, Tensor | complex) for number in numbers):
        return NotImplemented
    return x if is_plain(x) and x.dtype.is_floating_point else NotImplemented


def _clamp_in_place(x: Tensor, low: Any = None, high: Any = None) -> Any:
    return NotImplemented if low is None and high is None else _itself(x, low, high)


def _scale_in_place(x: Tensor, y: Any) -> Any:
    """By a number, or by a tensor that is broadcast to the first."""
    if not isinstance(y, Tensor):
        return _itself(x, y)
    if not (is_plain(x) and is_plain(y) and x.dtype.is_floating_point and x.dtype is y.dtype):
        return NotImplemented
    return x if x.shape == y.shape or broadcast([x.shape, y.shape]) == x.shape else NotImplemented


def _add_in_place(x: Tensor, y: Any, *, alpha: Any = 1) -> Any:
    if isinstance(y, int) and isinstance(alpha, int):  # steps and batches are counted
        return x if is_plain(x) and x.dtype in (torch.int64, torch.float32) else NotImplemented
    if not isinstance(y, Tensor) or not isinstance(alpha, int | float) or x.dtype is not y.dtype:
        return NotImplemented
    fits = is_plain(x) and y.is_meta and x.shape == y.shape and x.dtype.is_floating_point
    return x if fits else NotImplemented


def _lerp_in_place(x: Tensor, end: Tensor, weight: Any) -> Any:
    fits = is_plain(x) and is_plain(end) and x.shape == end.shape and x.dtype is end.dtype
    return _itself(x, weight) if fits else NotImplemented


def _blend_in_place(x: Tensor, a: Tensor, b: Tensor, *, value: Any = 1) -> Any:
    fits = is_plain(x) and x.dtype.is_floating_point and not isinstance(value, complex)
    for t in (a, b):
        fits = fits and is_plain(t) and t.shape == x.shape and t.dtype is x.dtype
    return x if fits else NotImplemented


# ---- lists of tensors


def _pair_up(first: Sequence[Tensor], others: Sequence[Any]) -> bool:
    """Whether lists agree tensor by tensor, in one floating-point dtype; numbers may stand beside them."""
    if not first or not first[0].dtype.is_floating_point:
        return False
    kind = first[0].dtype
    shapes = []
    for x in first:
        if x.dtype is not kind or not x.is_meta:
            return False
        shapes.append(x.shape)
    for other in others:
        if not isinstance(other, list | tuple):
            if not isinstance(other, int | float):
                return False
        elif len(other) != len(first):
            return False
        elif isinstance(other[0], Tensor):
            for y, shape in zip(other, shapes, strict=True):
                if y.shape != shape or y.dtype is not kind or not y.is_meta:
                    return False
        elif not all(isinstance(number, int | float) for number in other):
            return False
    return True


def _foreach_in_place(first: Sequence[Tensor], *others: Any, alpha: Any = 1) -> Any:
    """An operator in place over lists, tensor by tensor."""
    return None if _pair_up(first, (*others, alpha)) else NotImplemented


def _foreach_scale_in_place(first: Sequence[Tensor], factor: Any) -> Any:
    """By one number on the GPU."""
    fits = isinstance(factor, Tensor) and factor.is_meta and factor.dim() == 0
    return None if fits and _pair_up(first, ()) and factor.dtype is first[0].dtype else NotImplemented


def _foreach_over(first: Sequence[Tensor], *others: Any, alpha: Any = 1) -> Any:
    """An operator over lists that makes a list, tensor by tensor."""
    if not _pair_up(first, (*others, alpha)):
        return NotImplemented
    for tensors in (first, *(other for other in others if isinstance(other, list | tuple))):
        if not all(map(is_plain, tensors)):
            return NotImplemented
    return [new(x.shape, x.stride(), x.dtype) for x in first]


KERNELS: Mapping[Any, Callable[..., Any]] = {
    **dict.fromkeys(
        (
            aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor,
            aten.mul.Scalar, aten.div.Scalar, aten.rsub.Scalar, aten.hardtanh.default,
        ),
        over_all,
    ),
    **dict.fromkeys(
        (
            aten.clamp_min.default, aten.relu.default, aten.gelu.default, aten.silu.default,
            aten.sigmoid.default, aten.tanh.default, aten.hardswish.default, aten.hardsigmoid.default,
            aten.leaky_relu.default, aten.elu.default, aten.exp.default, aten.neg.default, aten.rsqrt.default,
            aten.sqrt.default, aten.reciprocal.default, aten.sin.default, aten.cos.default, aten.log.default,
            aten.abs.default,
        ),
        _alone,
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
    **dict.fromkeys((aten.threshold_backward.default, aten.leaky_relu_backward.default), _input_first),
    aten.elu_backward.default: _elu_backward,
    aten.native_dropout_backward.default: _native_dropout_backward,
    aten.clamp.default: _clamp,
    aten.pow.Tensor_Scalar: _power,
    aten.where.self: _where,
    **dict.fromkeys(
        (
            aten.silu_.default, aten.hardtanh_.default, aten.hardswish_.default, aten.leaky_relu_.default,
            aten.div_.Scalar, aten.mul_.Scalar, aten.pow_.Scalar, aten.rsqrt_.default, aten.sqrt_.default,
            aten.clamp_min_.default, aten.elu_.default,
        ),
        _itself,
    ),
    **dict.fromkeys((aten.div_.Tensor, aten.mul_.Tensor), _scale_in_place),
    aten.clamp_.default: _clamp_in_place,
    aten.add_.Tensor: _add_in_place,
    aten.lerp_.Scalar: _lerp_in_place,
    aten.addcmul_.default: _blend_in_place,
    aten.addcdiv_.default: _blend_in_place,
    **dict.fromkeys(
        (
            aten._foreach_add_.List, aten._foreach_add_.Scalar, aten._foreach_mul_.Scalar,
            aten._foreach_div_.ScalarList, aten._foreach_lerp_.Scalar, aten._foreach_addcmul_.Scalar,
            aten._foreach_addcdiv_.Scalar, aten._foreach_addcdiv_.ScalarList, aten._foreach_sqrt_.default,
        ),
        _foreach_in_place,
    ),
    aten._foreach_mul_.Tensor: _foreach_scale_in_place,
    **dict.fromkeys(
        (aten._foreach_sqrt.default, aten._foreach_neg.default, aten._foreach_add.List), _foreach_over
    ),
}  # fmt: skip
