"""Skip the launches of Triton kernels in a capture.

Kernels allocate no memory. The Python code around a kernel allocates its outputs and temporaries, and runs
unchanged. If Triton is not installed, stand-ins for its modules let user code and libraries of kernels import
it. torch, and libraries that check whether Triton is installed, find that it is not.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

from planner.capture.cuda.callers import package_of
from planner.capture.patching import all_patched, patched

_NAME = "triton"
_ASKS = ("torch", "torchvision", "transformers", "accelerate", "peft", "bitsandbytes", "diffusers", "timm")
_RUNNERS = (("triton.runtime.jit", "JITFunction"), ("triton.runtime.autotuner", "Autotuner"))


class _Kernel:
    """The stand-in for a Triton kernel, whose launches, `kernel[grid](...)`, do nothing."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.fn = self.__wrapped__ = function
        self.__name__ = getattr(function, "__name__", "kernel")

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *args, **kwargs: None

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing, in place of a call of a device function. Only kernels call device functions."""


class _Name:
    """The stand-in for any name of Triton that only kernels use.

    Examples are types, functions and decorators.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name()

    def __getitem__(self, item: object) -> Any:
        return self

    def __or__(self, other: object) -> Any:
        return self

    __ror__ = __or__


class _Constant(_Name):
    """The stand-in for `tl.constexpr`, a constant of kernels."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return bool(self.value == getattr(other, "value", other))

    def __hash__(self) -> int:
        return hash(self.value)


class _Config:
    """The stand-in for `triton.Config`, a configuration of a kernel."""

    def __init__(self, kwargs: dict[str, Any], **options: Any) -> None:
        self.kwargs = kwargs
        vars(self).update(options)

    def all_kwargs(self) -> dict[str, Any]:
        """Return the kernel's constants and compile options in one dictionary."""
        return {**self.kwargs, **{name: value for name, value in vars(self).items() if name != "kwargs"}}


class _Module(ModuleType):
    """The stand-in for a module of Triton, with an attribute of any name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Constant if name == "constexpr" else _Name()


def _jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    return _Kernel if function is None else _Kernel(function)


def _passing(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    """Return a decorator that returns a kernel unchanged. It replaces Triton's decorators for autotuning."""
    return lambda kernel: kernel


def _next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length() if number > 1 else 1


_HOST = {  # names of Triton that Python code on the host calls
    "__version__": "3.7.0",
    "Config": _Config,
    "jit": _jit,
    "autotune": _passing,
    "heuristics": _passing,
    "cdiv": lambda number, divisor: -(-number // divisor),
    "next_power_of_2": _next_power_of_2,
}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An import finder that gives stand-ins for Triton's modules, but not to libraries that work without."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != _NAME or _asks():
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == _NAME:
            vars(module).update(_HOST)


def _asks() -> bool:
    """Return whether the importing code belongs to a library that works without Triton (`_ASKS`)."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        name = package_of(frame)
        if name not in ("importlib", __name__.partition(".")[0]):
            return name in _ASKS
        frame = frame.f_back
    return False


@contextmanager
def triton_importable() -> Iterator[None]:
    """Let user code import stand-ins for Triton, unless it is installed, inside the context."""
    if _NAME in sys.modules or importlib.util.find_spec(_NAME) is not None:
        yield
        return
    from torch.utils._triton import has_triton_package

    has_triton_package()  # caches that Triton is not installed
    finder = _Finder()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _Module)]:
            del sys.modules[name]


@contextmanager
def launches_skipped() -> Iterator[None]:
    """Skip the launches of kernels inside the context if an installed Triton has been imported."""
    with ExitStack() as stack:
        for name, kind in _RUNNERS:
            module = sys.modules.get(name)
            if module is not None and not isinstance(module, _Module):
                runner = getattr(module, kind)
                stack.enter_context(patched(runner, "run", lambda *args, **kwargs: None))
        yield


@contextmanager
def launching_nothing(module: ModuleType, kernels: Sequence[str]) -> Iterator[None]:
    """Replace a module's `triton` and its kernels by stand-ins inside the context."""
    made: dict[str, Any] = {name: _Kernel(getattr(module, name)) for name in kernels}
    made["triton"] = SimpleNamespace(**_HOST)
    with all_patched(module, made, create=True):
        yield
