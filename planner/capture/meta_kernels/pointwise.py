"""Meta kernels for pointwise operators.

Outputs are laid out as by ATen/TensorIterator.cpp. Each kernel returns NotImplemented for arguments that are
left to torch's kernel.
"""

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
    """Return a pointwise operator's output for floating-point tensors and real numbers, or NotImplemented.

    `dtype` is the output's dtype if it differs from the dtype to which the operands promote.
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
    """Return the output of a pointwise operator over one tensor, laid out as if there were no numbers."""
    if any(isinstance(number, complex) for number in numbers):
        return NotImplemented
    return pointwise_output(x, **options)


def _laid_over(tensors: Sequence[Tensor], kind: torch.dtype, dtype: torch.dtype, numbers: int = 0) -> Any:
    """Return a pointwise output of `dtype`, laid out as CUDA does for the operands, or NotImplemented.

    The operands are `tensors`, which promote to `kind`, and Python numbers if `numbers` is not 0.
    """
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
    # The CPU converts to the common dtype, which changes strides of expanded dimensions or of size 1.
    for t in tensors:
        is_converted = t.dtype is not kind and t.dtype is not torch.bool
        if is_converted and (0 in t.stride() or 1 in t.shape) and not is_contiguous_meta(t):
            return NotImplemented
    if numbers or is_broadcast:  # in both cases operands differ in shape
        strides.append((0,) * len(shape))
    return empty_strided(shape, pointwise_strides(shape, strides), dtype)


def _over(shape: Sequence[int], t: Tensor) -> tuple[int, ...]:
    """Return the strides of an operand broadcast to `shape`. Source: TensorIteratorBase::compute_strides."""
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
    """Return the output of hardtanh, or NotImplemented if its strides differ from the input's.

    torch clamps into an empty tensor, which is laid out later.
    """
    output = _alone(x, *numbers)
    return output if isinstance(output, Tensor) and output.stride() == x.stride() else NotImplemented


def _power(x: Tensor, exponent: Any) -> Any:
    """Return the output of `pow(x, exponent)`.

    Returns NotImplemented for an exponent of 1 and a non-contiguous tensor: torch then makes a copy, which is
    laid out differently from other powers. Also returns NotImplemented for an exponent that is a tensor.
    """
    if isinstance(exponent, Tensor) or (exponent == 1 and not is_contiguous_meta(x)):
        return NotImplemented
    return _alone(x, exponent)


def _derivative(grad: Tensor, x: Tensor, *numbers: Any, **options: Any) -> Any:
    """Return the gradient of an activation's input, laid out as a pointwise operator over (`grad`, `x`).

    Source: ATen/native/Activation.cpp. torch's meta kernels compose several operators, whose result has
    another layout if the layouts of gradient and input differ.
    """
    return pointwise_output(grad, x) if grad.shape == x.shape and grad.dtype is x.dtype else NotImplemented


def _input_first(grad: Tensor, x: Tensor, *numbers: Any) -> Any:
    """Return the gradient of an activation's input, laid out as a pointwise operator over (`x`, `grad`)."""
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
