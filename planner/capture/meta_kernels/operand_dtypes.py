"""Refuse operands of dtypes that CUDA's kernels refuse.

Meta kernels accept such operands.
"""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from planner.capture.meta_kernels.positions import check_positions
from planner.capture.operator_table import operator_table

DTYPES_FILE = Path(__file__).with_name("cuda_dtypes.json")  # by refused dtypes, by message: operators
NAMES = {  # names of dtypes in ATen's messages
    torch.bool: "Bool",
    torch.uint8: "Byte",
    torch.int8: "Char",
    torch.int16: "Short",
    torch.int32: "Int",
    torch.int64: "Long",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.float32: "Float",
    torch.float64: "Double",
    torch.complex64: "ComplexFloat",
    torch.complex128: "ComplexDouble",
}
_Args = tuple[Any, ...]


def find_check(func: Any) -> Callable[[_Args], None] | None:
    """Return a function that checks an operator's operands, or None if no check is needed.

    For operands that CUDA's kernel refuses, the function raises a RuntimeError in torch's words, or a
    PositionError. `tools/store_cuda_dtypes.py` stored the dtypes that torch 2.13 refuses.
    """
    check_more, refused = _CHECKS.get(func), _refused().get(_name_of(func))
    if refused is None:
        return check_more

    def check(args: _Args) -> None:
        if check_more is not None:
            check_more(args)
        message = refused.get(promoted(args))
        if message is not None:
            raise RuntimeError(message)

    return check


def _name_of(func: Any) -> str:
    return str(func).removeprefix("aten.").removesuffix(".default")


def promoted(args: _Args) -> torch.dtype | None:
    """Return the dtype to which the tensors in `args` promote, or None if it is not determined.

    The dtype is not determined if no tensor is on the meta device or a GPU, if a tensor is empty, and for
    more than two tensors of different dtypes.
    """
    tensors = [value for value in args if isinstance(value, Tensor)]
    if not any(t.is_meta or t.is_cuda for t in tensors) or not all(t.numel() for t in tensors):
        return None
    dtypes = {t.dtype for t in tensors}
    if len(dtypes) == 1:
        return dtypes.pop()
    return torch.result_type(*tensors) if len(tensors) == 2 else None


@cache
def _refused() -> Mapping[str, Mapping[torch.dtype | None, str]]:
    """Return torch's error messages by operator and refused dtype. The file of messages is read once."""
    refused: dict[str, dict[torch.dtype | None, str]] = {}
    stored = msgspec.json.decode(DTYPES_FILE.read_bytes(), type=dict[str, dict[str, str]])
    dtypes: dict[str, torch.dtype | None] = {name: dtype for dtype, name in NAMES.items()}
    for names, messages in stored.items():
        for message, operators in messages.items():
            found = {dtypes[name]: message.replace("{}", name) for name in names.split()}
            for operator in operators.split():
                refused.setdefault(operator, {}).update(found)
    return refused


def _check_pair(args: _Args, first: int) -> None:
    """Raise RuntimeError if the matrices `args[first]` and `args[first + 1]` of a product differ in dtype.

    Source: ATen/native/cuda/Blas.cpp.
    """
    one, other = args[first], args[first + 1]
    if isinstance(one, Tensor) and one.is_meta and isinstance(other, Tensor) and one.dtype is not other.dtype:
        names = f"{_dtype_name(one.dtype)} and {_dtype_name(other.dtype)}"
        raise RuntimeError(f"mat1 and mat2 must have the same dtype, but got {names}")


def _check_bmm(args: _Args) -> None:
    """Raise RuntimeError if CUDA's `bmm(a, b)` refuses the dtypes of its factors.

    The factors must have the same dtype. Outer products are multiplied element by element, and may have any
    dtype.
    """
    _check_pair(args, 0)
    refused = _refused()["baddbmm"]
    if args[0].is_meta and args[0].shape[2] > 1 and args[0].dtype in refused:
        raise RuntimeError(refused[args[0].dtype])


def _check_convolution(args: _Args) -> None:
    """Raise RuntimeError if the input and the weight of a convolution differ in dtype.

    Source: check_input_same_type_as_parameters, ATen/native/cudnn.
    """
    x, weight = args[0], args[1]
    if x.is_meta and x.dtype is not weight.dtype:
        raise RuntimeError(
            f"Input type ({_tensor_type(x)}) and weight type ({_tensor_type(weight)}) should be the same"
        )


def _check_assignment(args: _Args) -> None:
    """Raise RuntimeError if `index_put` assigns values of another dtype than the tensor's.

    Values without dimensions are not checked: they may be on the CPU, and torch converts such values. Source:
    TensorAdvancedIndexing.cpp.
    """
    given, values = args[0], args[2]
    if given.is_meta and values.is_meta and values.dim() and given.dtype is not values.dtype:
        raise RuntimeError(
            f"Index put requires the source and destination dtypes match, got {_dtype_name(given.dtype)} for "
            f"the destination and {_dtype_name(values.dtype)} for the source."
        )


_CHECKS: Mapping[Any, Callable[[_Args], None]] = operator_table(
    {
        "index_put index_put_ _index_put_impl_": _check_assignment,
        "mm": lambda args: _check_pair(args, 0),
        "bmm": _check_bmm,
        "addmm addmm_": lambda args: _check_pair(args, 1),
        "convolution": _check_convolution,
        "embedding": check_positions,
    }
)


def _dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in ATen's messages."""
    return NAMES.get(dtype, str(dtype).removeprefix("torch.").capitalize())


def _tensor_type(tensor: Tensor) -> str:
    if tensor.dtype is torch.bool:
        return "CUDABoolType"
    return f"torch.cuda.{_dtype_name(tensor.dtype)}Tensor"
