"""Outputs of pointwise operators on `meta`, laid out as by ATen/TensorIterator.cpp."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from planner.capture.meta_kernels.strides import (
    broadcast,
    contiguous,
    empty,
    empty_strided,
    is_contiguous_meta,
    pointwise_strides,
)

aten = torch.ops.aten


def pointwise_output(*operands: Any, dtype: torch.dtype | None = None, **_: Any) -> Any:
    """Return one output over all operands: floating-point tensors, broadcast or not.

    Operands that are no tensors are numbers, which decide nothing here. `dtype` is that of the output where
    it is not what the operands promote to.
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
    """Return an output over one tensor and numbers that are no operands.

    CUDA puts its strides in order where they are unusual in dimensions of size 1 alone; torch's meta kernels
    keep them.
    """
    is_simple = isinstance(x, Tensor) and x.is_meta and x.dtype.is_floating_point and 0 not in x.shape
    if is_simple and x.is_contiguous() and not any(isinstance(number, complex) for number in numbers):
        return empty(x.shape, x.dtype)
    return pointwise_output(x, *numbers, **options)


def _laid_over(tensors: Sequence[Tensor], kind: torch.dtype, dtype: torch.dtype) -> Any:
    """Return an output of this dtype over these operands, which promote to `kind`."""
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
    if strides.count(contiguous(shape)) == len(strides):
        return empty(shape, dtype)
    # torch converts half precision there and back, and other dtypes to the common one, which puts what is
    # expanded or of size 1 in order.
    for t in tensors:
        is_converted = t.dtype.itemsize == 2 or (t.dtype is not kind and t.dtype is not torch.bool)
        if is_converted and (0 in t.stride() or 1 in t.shape) and not is_contiguous_meta(t):
            return NotImplemented
    output = pointwise_strides(shape, strides)
    return NotImplemented if output is None else empty_strided(shape, output, dtype)


def _truth(x: Tensor, *numbers: Any) -> Any:
    """Compare with a number."""
    return pointwise_output(x, *numbers, dtype=torch.bool)


def _where(condition: Tensor, x: Tensor, y: Tensor) -> Any:
    if condition.dtype is not torch.bool or x.dtype is not y.dtype or not x.dtype.is_floating_point:
        return NotImplemented
    return _laid_over((condition, x, y), x.dtype, x.dtype)


def _clamp(x: Tensor, low: Any = None, high: Any = None) -> Any:
    return NotImplemented if low is None and high is None else pointwise_output(x, low, high)


def _power(x: Tensor, exponent: Any) -> Any:
    """Leave an exponent of one to torch: a copy, laid out in another way than the other powers."""
    if isinstance(exponent, Tensor) or (exponent == 1 and not is_contiguous_meta(x)):
        return NotImplemented
    return pointwise_output(x, exponent)


def _derivative(grad: Tensor, x: Tensor, *numbers: Any, **options: Any) -> Any:
    """Return one output over the gradient and the input, in this order (ATen/native/Activation.cpp).

    torch's meta kernels compose several, which end in another layout where the two differ in theirs.
    """
    return pointwise_output(grad, x) if grad.shape == x.shape and grad.dtype is x.dtype else NotImplemented


def _input_first(grad: Tensor, x: Tensor, *numbers: Any) -> Any:
    """Return one output over the input and the gradient, in this order."""
    return _derivative(x, grad)


def _elu_backward(grad: Tensor, alpha: Any, scale: Any, input_scale: Any, is_result: bool, x: Tensor) -> Any:
    return _derivative(grad, x)


def _native_dropout_backward(grad: Tensor, mask: Tensor, scale: float) -> Any:
    fits = (
        is_contiguous_meta(grad)
        and is_contiguous_meta(mask)
        and grad.shape == mask.shape
        and mask.dtype is torch.bool
    )
    return pointwise_output(grad) if fits else NotImplemented


# ---- in place


def _itself(x: Tensor, *numbers: Any, **_: Any) -> Any:
    """Return the first tensor, changed in place."""
    if any(isinstance(number, Tensor | complex) for number in numbers):
        return NotImplemented
    return x if is_contiguous_meta(x) and x.dtype.is_floating_point else NotImplemented


def _clamp_in_place(x: Tensor, low: Any = None, high: Any = None) -> Any:
    return NotImplemented if low is None and high is None else _itself(x, low, high)


def _scale_in_place(x: Tensor, y: Any) -> Any:
    """Scale by a number, or by a tensor that is broadcast to the first."""
    if not isinstance(y, Tensor):
        return _itself(x, y)
    if not (
        is_contiguous_meta(x) and is_contiguous_meta(y) and x.dtype.is_floating_point and x.dtype is y.dtype
    ):
        return NotImplemented
    return x if x.shape == y.shape or broadcast([x.shape, y.shape]) == x.shape else NotImplemented


def _add_in_place(x: Tensor, y: Any, *, alpha: Any = 1) -> Any:
    if isinstance(y, int) and isinstance(alpha, int):  # steps and batches are counted
        return x if is_contiguous_meta(x) and x.dtype in (torch.int64, torch.float32) else NotImplemented
    if not isinstance(y, Tensor) or not isinstance(alpha, int | float) or x.dtype is not y.dtype:
        return NotImplemented
    fits = is_contiguous_meta(x) and y.is_meta and x.shape == y.shape and x.dtype.is_floating_point
    return x if fits else NotImplemented


def _lerp_in_place(x: Tensor, end: Tensor, weight: Any) -> Any:
    fits = is_contiguous_meta(x) and is_contiguous_meta(end) and x.shape == end.shape and x.dtype is end.dtype
    return _itself(x, weight) if fits else NotImplemented


def _blend_in_place(x: Tensor, a: Tensor, b: Tensor, *, value: Any = 1) -> Any:
    fits = is_contiguous_meta(x) and x.dtype.is_floating_point and not isinstance(value, complex)
    for t in (a, b):
        fits = fits and is_contiguous_meta(t) and t.shape == x.shape and t.dtype is x.dtype
    return x if fits else NotImplemented


# ---- lists of tensors


def _pair_up(first: Sequence[Tensor], others: Sequence[Any]) -> bool:
    """Return whether lists, or numbers, match tensor by tensor in one floating-point dtype."""
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
    """Change a list in place, tensor by tensor."""
    return None if _pair_up(first, (*others, alpha)) else NotImplemented


def _foreach_scale_in_place(first: Sequence[Tensor], factor: Any) -> Any:
    """Scale a list by one number on the GPU."""
    fits = isinstance(factor, Tensor) and factor.is_meta and factor.dim() == 0
    return None if fits and _pair_up(first, ()) and factor.dtype is first[0].dtype else NotImplemented


def _foreach_over(first: Sequence[Tensor], *others: Any, alpha: Any = 1) -> Any:
    """Return a new list, tensor by tensor."""
    if not _pair_up(first, (*others, alpha)):
        return NotImplemented
    for tensors in (first, *(other for other in others if isinstance(other, list | tuple))):
        if not all(map(is_contiguous_meta, tensors)):
            return NotImplemented
    return [empty_strided(x.shape, x.stride(), x.dtype) for x in first]


KERNELS: Mapping[Any, Callable[..., Any]] = {
    **dict.fromkeys(
        (
            aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor,
            aten.mul.Scalar, aten.div.Scalar, aten.rsub.Scalar, aten.hardtanh.default,
        ),
        pointwise_output,
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
