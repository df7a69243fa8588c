"""Run inductor's generated Python code on meta tensors.

The generated code allocates, calls kernels and external operators, and deletes variables, in the same order
as on a GPU. Names in the code that need a GPU are replaced by counterparts for meta tensors, so that the
recorder sees the allocations.
"""

import ast
from collections.abc import Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._inductor import async_compile

from planner.capture.inductor.kernels import Kernels
from planner.capture.patching import patched

_ALIGNMENT_BYTES = 16


class _AsyncCompile:
    """The stand-in for inductor's `AsyncCompile`. Generated code compiles its kernels through it."""

    kernels: Kernels

    def triton(self, name: str, source: str, device_str: str = "cuda") -> Any:
        """Return the stand-in for a Triton kernel. Nothing is compiled."""
        return self.kernels.get(source)

    def cpp_pybinding(self, argtypes: list[str], source: str, **options: Any) -> Any:
        """Return a CPU kernel that does nothing."""
        return lambda *arguments: None

    def wait(self, scope: dict[str, Any]) -> None:
        """Do nothing, since nothing is compiled."""


def load_wrapper(source: str, constants: Mapping[str, Any], kernels: Kernels) -> SimpleNamespace:
    """Run a generated module's source, and return its functions `call` and `runner`.

    `runner` runs the parts that CUDA graphs hold; `runner` is None if the source defines no runner.
    """
    compiling = type("AsyncCompile", (_AsyncCompile,), {"kernels": kernels})
    scope: dict[str, Any] = {"__name__": "generated", **constants}
    with patched(async_compile, "AsyncCompile", compiling):
        exec(compile(_without_gpu_imports(source), "<inductor>", "exec"), scope)
    scope |= _REPLACED
    call = scope["call"]

    def run(arguments: list[Any]) -> Any:
        with (
            patched(torch.cuda, "_DeviceGuard", lambda index: nullcontext()),
            patched(torch.cuda, "set_device", lambda device: None),
        ):
            return call(arguments)

    return SimpleNamespace(call=run, runner=scope.get("runner"))


def _without_gpu_imports(source: str) -> ast.Module:
    """Return a generated module's syntax tree without its imports of Triton and of GPU streams."""
    module = ast.parse(source)
    module.body = [statement for statement in module.body if not _imports_gpu(statement)]
    return module


def _imports_gpu(statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.Import | ast.ImportFrom):
        return False
    names = [alias.asname or alias.name for alias in statement.names]
    return "get_raw_stream" in names or any(name.partition(".")[0] in ("triton", "tl") for name in names)


def _empty_strided(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="meta")


def _copy_if_misaligned(tensor: Tensor) -> Tensor:
    """Return a tensor, or a copy if it is not aligned to 16 bytes. Source: torch/csrc/dynamo/guards.cpp."""
    if tensor.storage_offset() * tensor.element_size() % _ALIGNMENT_BYTES == 0:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _device(*arguments: Any, **options: Any) -> torch.device:
    named = torch.device(*arguments, **options)
    return torch.device("meta") if named.type == "cuda" else named


_REPLACED: dict[str, Any] = {
    "empty_strided_cuda": _empty_strided,
    "copy_if_misaligned": _copy_if_misaligned,
    "assert_alignment": lambda *_: None,
    "get_raw_stream": lambda index: 0,
    "device": _device,
}
