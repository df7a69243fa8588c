"""Refuse operands of products that CUDA's kernels refuse and torch's kernels on `meta` take."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from planner.capture.operator_table import operator_table


def _check_pair(args: tuple[Any, ...], first: int, kernel: str) -> None:
    """Raise RuntimeError, in torch's words, unless both factors have one dtype that the kernel multiplies."""
    one, other = args[first], args[first + 1]
    if not (isinstance(one, Tensor) and one.is_meta and isinstance(other, Tensor)):
        return
    if one.dtype is not other.dtype:
        names = f"{_name(one.dtype)} and {_name(other.dtype)}"
        raise RuntimeError(f"mat1 and mat2 must have the same dtype, but got {names}")
    if not (one.dtype.is_floating_point or one.dtype.is_complex):
        raise RuntimeError(f"\"{kernel}\" not implemented for '{_name(one.dtype)}'")


def _check_mm(args: tuple[Any, ...]) -> None:
    """Check `mm(a, b)` (addmm_out_cuda_impl, ATen/native/cuda/Blas.cpp)."""
    _check_pair(args, 0, "addmm_cuda")


def _check_addmm(args: tuple[Any, ...]) -> None:
    """Check `addmm(bias, a, b)` (as above)."""
    _check_pair(args, 1, "addmm_cuda")


def _check_bmm(args: tuple[Any, ...]) -> None:
    """Check `bmm(a, b)` (bmm_out_cuda_impl, ATen/native/cuda/Blas.cpp)."""
    _check_pair(args, 0, "bmm_cuda")


def _check_convolution(args: tuple[Any, ...]) -> None:
    """Check `convolution(input, weight, ...)` (check_input_same_type_as_parameters, ATen/native/cudnn)."""
    x, weight = args[0], args[1]
    if x.is_meta and x.dtype is not weight.dtype:
        raise RuntimeError(
            f"Input type ({_tensor_type(x)}) and weight type ({_tensor_type(weight)}) should be the same"
        )


CHECKS: Mapping[Any, Callable[[tuple[Any, ...]], None]] = operator_table(
    {"mm": _check_mm, "addmm addmm_": _check_addmm, "bmm": _check_bmm, "convolution": _check_convolution}
)
_NAMES = {
    torch.bool: "Bool",
    torch.uint8: "Byte",
    torch.int8: "Char",
    torch.int16: "Short",
    torch.int32: "Int",
    torch.int64: "Long",
    torch.float16: "Half",
    torch.float32: "Float",
    torch.float64: "Double",
    torch.bfloat16: "BFloat16",
    torch.complex64: "ComplexFloat",
    torch.complex128: "ComplexDouble",
}


def _name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in ATen's messages."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch.").capitalize())


def _tensor_type(tensor: Tensor) -> str:
    return f"torch.cuda.{_name(tensor.dtype)}Tensor"
