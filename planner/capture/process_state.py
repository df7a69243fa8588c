"""What a model may change in the process that runs it, put back as it was.

A model's code is anybody's: its file sets the default dtype, its constructor the environment, its forward
pass leaves inference mode on. While a trace runs that is as it would be on a GPU; afterwards the planner has
to go on, and so does whoever called it. What Python cannot put back (patched modules, threads, a process that
ends) takes a process of its own: `planner.capture.subprocess.client`.
"""

import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_AUTOCAST_DEVICES = ("cuda", "cpu")


@dataclass(frozen=True, slots=True)
class Setting:
    """One thing that code may set for the whole process or thread."""

    read: Callable[[], Any]
    write: Callable[[Any], object]


def _write_path(folders: list[str]) -> None:
    sys.path[:] = folders


def _write_environment(wanted: Mapping[str, str]) -> None:
    for name in os.environ.keys() - wanted.keys():
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _folder() -> Path | None:
    with suppress(OSError):  # somebody removed it
        return Path.cwd()
    return None


def _enter(folder: Path | None) -> None:
    if folder is not None:
        with suppress(OSError):
            os.chdir(folder)


def _own_device() -> torch.device | None:
    """What `torch.set_default_device` set; not a `with torch.device(...)` around this."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


def _autocast() -> tuple[Any, ...]:
    return (
        *(
            (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in _AUTOCAST_DEVICES
        ),
        torch.is_autocast_cache_enabled(),
    )


def _set_autocast(state: tuple[Any, ...]) -> None:
    *devices, caching = state
    for device, (enabled, dtype) in zip(_AUTOCAST_DEVICES, devices, strict=True):
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_cache_enabled(caching)
    torch.clear_autocast_cache()


def _set_rng_state(state: bytes) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _of(holder: Any, name: str) -> Setting:
    return Setting(lambda: getattr(holder, name), lambda value: setattr(holder, name, value))


def _settings() -> tuple[Setting, ...]:
    cudnn = torch.backends.cudnn
    return (
        Setting(torch.get_default_dtype, torch.set_default_dtype),
        Setting(_own_device, torch.set_default_device),
        Setting(torch.is_grad_enabled, torch.set_grad_enabled),
        Setting(torch.is_anomaly_enabled, torch.set_anomaly_enabled),
        Setting(_autocast, _set_autocast),
        Setting(torch.get_num_threads, torch.set_num_threads),
        Setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        Setting(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
        *(_of(cudnn, name) for name in ("enabled", "benchmark", "deterministic", "allow_tf32")),
        Setting(lambda: list(sys.path), _write_path),
        Setting(sys.getrecursionlimit, sys.setrecursionlimit),
        Setting(lambda: dict(os.environ), _write_environment),
        Setting(_folder, _enter),
    )


def _of_the_process() -> tuple[Setting, ...]:
    """What is put back but never set again for a model whose file changed it."""
    return (
        *(_of(sys, name) for name in ("stdout", "stderr", "excepthook")),
        Setting(random.getstate, random.setstate),
        Setting(lambda: torch.get_rng_state().numpy().tobytes(), _set_rng_state),
        *([_INTERRUPT] if threading.current_thread() is threading.main_thread() else []),
    )


_INTERRUPT = Setting(
    lambda: signal.getsignal(signal.SIGINT),
    lambda handler: None if handler is None else signal.signal(signal.SIGINT, handler),
)


@dataclass(frozen=True, slots=True)
class Changes:
    """The settings that some code left otherwise than it found them."""

    found: tuple[tuple[Setting, Any], ...] = ()

    def apply(self) -> None:
        """Leave them so again."""
        for setting, value in self.found:
            setting.write(value)


@contextmanager
def left_clean() -> Iterator[Callable[[], Changes]]:
    """What runs in here changes nothing that outlasts it. Gives a function that tells what is changed."""
    settings = [(setting, setting.read()) for setting in _settings()]
    of_the_process = [(setting, setting.read()) for setting in _of_the_process()]
    modes = _Modes()

    def changes() -> Changes:
        now = [(setting, setting.read(), before) for setting, before in settings]
        return Changes(tuple((setting, value) for setting, value, before in now if value != before))

    try:
        with warnings.catch_warnings():
            yield changes
    finally:
        modes.restore()
        for setting, before in (*of_the_process, *settings):
            if setting.read() != before:
                setting.write(before)


def text_of(error: BaseException) -> str:
    """What an exception says, which is the code of whoever defined it; "" where that fails."""
    try:
        return str(error)
    except Exception:
        return ""


class _Modes:
    """The modes of this thread when it was made, to be left as they were."""

    def __init__(self) -> None:
        self._inference = torch.is_inference_mode_enabled()
        self._nesting = _autocast_nesting()
        self._functions = _function_modes()
        self._dispatch = torch._C._len_torch_dispatch_stack()

    def restore(self) -> None:
        """Leave what is on and was not, from the inside out."""
        while torch._C._len_torch_dispatch_stack() > self._dispatch:
            torch._C._pop_torch_dispatch_stack(None)
        if _function_modes() != self._functions:
            while torch._C._len_torch_function_stack():
                torch._C._pop_torch_function_stack()
            for mode in self._functions:
                torch._C._push_on_torch_function_stack(mode)
        while _autocast_nesting() > self._nesting:
            torch.autocast_decrement_nesting()
        if torch.is_inference_mode_enabled() != self._inference:
            # Whoever left it on may hold the guard that would turn it off; one of ours does it now.
            torch._C._InferenceMode(self._inference).__enter__()  # type: ignore[no-untyped-call]


def _autocast_nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _function_modes() -> list[Any]:
    return [torch._C._get_function_stack_at(index) for index in range(torch._C._len_torch_function_stack())]
