"""Outputs of pointwise operators on `meta`, laid out as by ATen/TensorIterator.cpp."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from planner.capture.meta_kernels.strides import (
    broadcast,
    empty,
    empty_strided,
    is_contiguous_meta,
    pointwise_strides,
)


def pointwise_output(*operands: Any, dtype: torch.dtype | None = None, **_: Any) -> Any:
    """Return one output over all operands: floating-point tensors, broadcast or not.

    `dtype` is that of the output where it is not what the operands promote to.
    """
    tensors = []
    has_number = False
    kind: torch.dtype | None = None
    for operand in operands:
        if isinstance(operand, Tensor):
            tensors.append(operand)
            if operand.dtype is not kind:
                if not operand.dtype.is_floating_point:
                    return NotImplemented
                kind = operand.dtype if kind is None else torch.result_type(*tensors[:2])
        elif isinstance(operand, bool | complex):
            return NotImplemented
        else:
            has_number = True
    if kind is None or (len(tensors) > 2 and any(t.dtype is not kind for t in tensors)):
        return NotImplemented
    return _laid_over(tensors, kind, dtype or kind, numbers=int(has_number))


def _alone(x: Any, *numbers: Any, **options: Any) -> Any:
    """Return an output over one tensor and numbers that are no operands."""
    if any(isinstance(number, complex) for number in numbers):
        return NotImplemented
    return pointwise_output(x, **options)


def _laid_over(tensors: Sequence[Tensor], kind: torch.dtype, dtype: torch.dtype, numbers: int = 0) -> Any:
    """Return an output of this dtype over these operands, which promote to `kind`, and so many numbers."""
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
    if 0 in shape:
        return NotImplemented
    strides = [_over(shape, t) for t in tensors]
    # The CPU converts to the common dtype, which puts what is expanded or of size 1 in order.
    for t in tensors:
        is_converted = t.dtype is not kind and t.dtype is not torch.bool
        if is_converted and (0 in t.stride() or 1 in t.shape) and not is_contiguous_meta(t):
            return NotImplemented
    if numbers or is_broadcast:  # then the operands differ in shape
        strides.append((0,) * len(shape))
    return empty_strided(shape, pointwise_strides(shape, strides), dtype)


def _over(shape: Sequence[int], t: Tensor) -> tuple[int, ...]:
    """Return the strides of an operand in the common shape (TensorIteratorBase::compute_strides)."""
    missing = len(shape) - t.dim()
    own = (0 if t.shape[d] == 1 != shape[missing + d] else t.stride(d) for d in range(t.dim()))
    return (0,) * missing + tuple(own)


def _where(condition: Tensor, x: Tensor, y: Tensor) -> Any:
    if condition.dtype is not torch.bool or x.dtype is not y.dtype or not x.dtype.is_floating_point:
        return NotImplemented
    return _laid_over((condition, x, y), x.dtype, x.dtype)


def _clamp(x: Tensor, low: Any = None, high: Any = None) -> Any:
    return NotImplemented if low is None and high is None else _alone(x, low, high)


def _hardtanh(x: Tensor, *numbers: Any) -> Any:
    """Leave tensors of unusual strides to torch: it clamps into an empty tensor, which is laid out later."""
    output = _alone(x, *numbers)
    return output if isinstance(output, Tensor) and output.stride() == x.stride() else NotImplemented


def _power(x: Tensor, exponent: Any) -> Any:
    """Leave an exponent of one to torch: a copy, laid out in another way than the other powers."""
    if isinstance(exponent, Tensor) or (exponent == 1 and not is_contiguous_meta(x)):
        return NotImplemented
    return _alone(x, exponent)


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


def _foreach_unary(tensors: Sequence[Tensor]) -> Any:
    fits = all(is_contiguous_meta(x) and x.dtype.is_floating_point for x in tensors)
    return [empty(x.shape, x.dtype) for x in tensors] if fits else NotImplemented


KERNELS: Mapping[str, Callable[..., Any]] = {
    "add.Tensor sub.Tensor mul.Tensor div.Tensor mul.Scalar div.Scalar": pointwise_output,
    "rsub.Scalar": pointwise_output,
    "hardtanh": _hardtanh,
    "clamp_min relu gelu silu mish sigmoid tanh hardswish hardsigmoid leaky_relu elu": _alone,
    "exp neg rsqrt sqrt reciprocal sin cos log abs": _alone,
    "eq.Scalar ne.Scalar ge.Scalar le.Scalar gt.Scalar lt.Scalar": partial(
        pointwise_output, dtype=torch.bool
    ),
    "gelu_backward silu_backward mish_backward sigmoid_backward tanh_backward": _derivative,
    "hardtanh_backward hardswish_backward hardsigmoid_backward": _derivative,
    "threshold_backward leaky_relu_backward": _input_first,
    "elu_backward": _elu_backward,
    "clamp": _clamp,
    "pow.Tensor_Scalar": _power,
    "where.self": _where,
    "_foreach_sqrt _foreach_neg": _foreach_unary,
}
