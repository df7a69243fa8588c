"""Preserve the state of the process while a model's code runs in it.

That code may be anything: a file sets the default dtype, a constructor the environment, a forward pass leaves
inference mode on. During a capture that holds as it would on a GPU; afterwards the planner and its caller go
on as before. What Python cannot restore (patched modules, threads, a process that ends) needs a process of
its own: `planner.capture.subprocess`.
"""

import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

_AUTOCAST_DEVICES = ("cuda", "cpu")
_PRECISIONS = (
    ("generic", "all"),
    *((backend, op) for backend in ("cuda", "mkldnn") for op in ("all", "conv", "rnn", "matmul")),
)


# A value that code may set for the whole process or thread: functions that read and set it.
_Setting = tuple[Callable[[], Any], Callable[[Any], object]]


@contextmanager
def preserve_process_state() -> Iterator[Callable[[], Callable[[], None]]]:
    """Restore on exit every setting that changed.

    Yields a function that notes the changes so far and returns one that makes them again.
    """
    settings = [(read, write, read()) for read, write in _reapplied_settings()]
    restored_only = [(read, write, read()) for read, write in _restored_settings()]
    restore_modes = _note_modes()

    def note_changes() -> Callable[[], None]:
        values = [(write, read(), before) for read, write, before in settings]

        def change() -> None:
            for write, value, before in values:
                if value != before:
                    write(value)

        return change

    try:
        with warnings.catch_warnings():
            yield note_changes
    finally:
        restore_modes()
        for read, write, before in (*restored_only, *settings):
            if read() != before:
                write(before)


def is_launched() -> bool:
    """Return whether torchrun or the like started the process as one rank of several."""
    return "WORLD_SIZE" in os.environ


def message_of(error: BaseException) -> str:
    """Return the message of an exception, which its author's code makes; "" where that fails."""
    try:
        return str(error)
    except Exception:
        return ""


def first_line_of(error: BaseException) -> str:
    """Return the class of an exception and the first line of its message."""
    lines = message_of(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


# ---- settings


def _reapplied_settings() -> tuple[_Setting, ...]:
    """Return the settings that are set again for a model whose file changed them."""
    cudnn = torch.backends.cudnn
    return (
        (torch.get_default_dtype, torch.set_default_dtype),
        (_default_device, torch.set_default_device),
        (torch.is_grad_enabled, torch.set_grad_enabled),
        (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
        (_autocast_state, _set_autocast_state),
        (torch.get_num_threads, torch.set_num_threads),
        _unless_mixed((torch.get_float32_matmul_precision, torch.set_float32_matmul_precision)),
        (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
        *(_attribute(cudnn, name) for name in ("enabled", "benchmark", "deterministic")),
        _unless_mixed(_attribute(cudnn, "allow_tf32")),
        (_float32_precisions, _set_float32_precisions),  # after those that change them
        (lambda: list(sys.path), lambda path: sys.path.__setitem__(slice(None), path)),
        (lambda: list(sys.argv), lambda words: sys.argv.__setitem__(slice(None), words)),
        (sys.getrecursionlimit, sys.setrecursionlimit),
        (lambda: dict(os.environ), _set_environment),
        (_working_directory, _change_directory),
        (_activation_budget, _set_activation_budget),
    )


def _restored_settings() -> tuple[_Setting, ...]:
    """Return the settings that are restored but never set again for a model whose file changed them."""
    on_main_thread = threading.current_thread() is threading.main_thread()
    return (
        *(_attribute(sys, name) for name in ("stdout", "stderr", "excepthook")),
        (random.getstate, random.setstate),
        (lambda: torch.get_rng_state().numpy().tobytes(), _set_rng_state),
        *_numpy_states(),
        *([(lambda: signal.getsignal(signal.SIGINT), _set_interrupt)] if on_main_thread else []),
    )


def _attribute(holder: Any, name: str) -> _Setting:
    return lambda: getattr(holder, name), lambda value: setattr(holder, name, value)


def _unless_mixed(setting: _Setting) -> _Setting:
    """Return a setting that is None, and left alone, where torch refuses to read it.

    It does where a program has set `fp32_precision`, which says the same in another way, for a part of torch.
    """
    read, write = setting

    def read_or_none() -> Any:
        try:
            return read()
        except RuntimeError:
            return None

    return read_or_none, lambda value: None if value is None else write(value)


def _float32_precisions() -> tuple[str, ...]:
    """Return `fp32_precision` of each of torch's backends, which torch has since 2.9."""
    read = getattr(torch._C, "_get_fp32_precision_getter", None)
    return () if read is None else tuple(read(*place) for place in _PRECISIONS)


def _set_float32_precisions(values: tuple[str, ...]) -> None:
    for place, value in zip(_PRECISIONS, values, strict=False):
        torch._C._set_fp32_precision_setter(*place, value)


def _default_device() -> torch.device | None:
    """Return the device set by `torch.set_default_device`, not by `with torch.device(...)`."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


def _autocast_state() -> tuple[Any, ...]:
    devices = [(torch.is_autocast_enabled(one), torch.get_autocast_dtype(one)) for one in _AUTOCAST_DEVICES]
    return (*devices, torch.is_autocast_cache_enabled())


def _set_autocast_state(state: tuple[Any, ...]) -> None:
    *devices, caching = state
    for device, (enabled, dtype) in zip(_AUTOCAST_DEVICES, devices, strict=True):
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_cache_enabled(caching)
    torch.clear_autocast_cache()


def _set_environment(values: Mapping[str, str]) -> None:
    for name in os.environ.keys() - values.keys():
        del os.environ[name]
    for name, value in values.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _activation_budget() -> float:
    """Return the share of activations that compiled code keeps; 1.0, torch's, before it is imported."""
    config: Any = sys.modules.get("torch._functorch.config")
    return 1.0 if config is None else config.activation_memory_budget


def _set_activation_budget(share: float) -> None:
    config: Any = sys.modules.get("torch._functorch.config")
    if config is not None:
        config.activation_memory_budget = share


def _working_directory() -> Path | None:
    with suppress(OSError):  # somebody removed it
        return Path.cwd()
    return None


def _change_directory(folder: Path | None) -> None:
    if folder is not None:
        with suppress(OSError):
            os.chdir(folder)


def _set_rng_state(state: bytes) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _numpy_states() -> tuple[_Setting, ...]:
    """Return the state of NumPy's global generator, which augmentations draw from, if NumPy is imported."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or not isinstance(numpy.random.get_state(), tuple):  # of another bit generator
        return ()

    def read() -> tuple[Any, ...]:
        name, keys, *rest = numpy.random.get_state()
        return (name, keys.tobytes(), *rest)

    def write(state: tuple[Any, ...]) -> None:
        name, keys, *rest = state
        numpy.random.set_state((name, numpy.frombuffer(keys, numpy.uint32), *rest))

    return ((read, write),)


def _set_interrupt(handler: Any) -> None:
    if handler is not None:
        signal.signal(signal.SIGINT, handler)


def _note_modes() -> Callable[[], None]:
    """Return a function that leaves the torch modes which this thread enters from now on."""
    inference, nesting = torch.is_inference_mode_enabled(), _autocast_nesting()
    functions, dispatch = _function_modes(), torch._C._len_torch_dispatch_stack()

    def restore() -> None:
        """Leave them from the inside out."""
        while torch._C._len_torch_dispatch_stack() > dispatch:
            torch._C._pop_torch_dispatch_stack(None)
        if _function_modes() != functions:
            while torch._C._len_torch_function_stack():
                torch._C._pop_torch_function_stack()
            for mode in functions:
                torch._C._push_on_torch_function_stack(mode)
        while _autocast_nesting() > nesting:
            torch.autocast_decrement_nesting()
        if torch.is_inference_mode_enabled() != inference:
            # Whoever left it on may hold the guard that would turn it off; one of ours does it now.
            torch._C._InferenceMode(inference).__enter__()  # type: ignore[no-untyped-call]

    return restore


def _autocast_nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _function_modes() -> list[Any]:
    return [torch._C._get_function_stack_at(index) for index in range(torch._C._len_torch_function_stack())]
