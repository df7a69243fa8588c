"""Outputs of pointwise operators on `meta`, laid out as by ATen/TensorIterator.cpp."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
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


def _foreach_unary(tensors: Sequence[Tensor]) -> Any:
    fits = all(is_contiguous_meta(x) and x.dtype.is_floating_point for x in tensors)
    return [empty(x.shape, x.dtype) for x in tensors] if fits else NotImplemented


KERNELS: Mapping[str, Callable[..., Any]] = {
    "add.Tensor sub.Tensor mul.Tensor div.Tensor mul.Scalar div.Scalar": pointwise_output,
    "rsub.Scalar hardtanh": pointwise_output,
    "clamp_min relu gelu silu sigmoid tanh hardswish hardsigmoid leaky_relu elu": _alone,
    "exp neg rsqrt sqrt reciprocal sin cos log abs": _alone,
    "eq.Scalar ne.Scalar ge.Scalar le.Scalar gt.Scalar lt.Scalar": partial(
        pointwise_output, dtype=torch.bool
    ),
    "gelu_backward silu_backward sigmoid_backward tanh_backward": _derivative,
    "hardtanh_backward hardswish_backward hardsigmoid_backward": _derivative,
    "threshold_backward leaky_relu_backward": _input_first,
    "elu_backward": _elu_backward,
    "clamp": _clamp,
    "pow.Tensor_Scalar": _power,
    "where.self": _where,
    "_foreach_sqrt _foreach_neg": _foreach_unary,
}
