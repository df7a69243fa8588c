"""List the process-wide settings that a model's code may change.

`process_state` saves and restores all of them. Settings that influence a trace have a default; if the
process has another value, the value is part of a stored trace's key (`changed_settings`).
"""

import gc
import locale
import logging
import os
import random
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

_AUTOCAST_DEVICES = ("cuda", "cpu")
_PRECISIONS = (
    ("generic", "all"),
    *((backend, op) for backend in ("cuda", "mkldnn") for op in ("all", "conv", "rnn", "matmul")),
)
_DEFAULT_PRECISIONS = ("none", "none", "tf32", "tf32", "none", "none", "none", "none", "none")


class Setting(NamedTuple):
    """A setting of the process or of the current thread, with functions that read and write it."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    defaults: tuple[Any, ...] = ()  # values in a fresh process, for settings that influence a trace


def reapplied_settings() -> tuple[Setting, ...]:
    """Return the settings that are set again for each capture if the model's file changed them."""
    cudnn = torch.backends.cudnn
    return (
        Setting("default dtype", torch.get_default_dtype, torch.set_default_dtype, (torch.float32,)),
        Setting("default device", _default_device, torch.set_default_device, (None,)),
        Setting("gradients", torch.is_grad_enabled, torch.set_grad_enabled, (True,)),
        Setting("anomaly detection", torch.is_anomaly_enabled, torch.set_anomaly_enabled, (False,)),
        Setting("autocast", _autocast_state, _set_autocast_state, (_AUTOCAST_OFF,)),
        Setting("threads", torch.get_num_threads, torch.set_num_threads),
        _unless_mixed(
            Setting(
                "float32 matmul precision",
                torch.get_float32_matmul_precision,
                torch.set_float32_matmul_precision,
                ("highest",),
            )
        ),
        Setting("deterministic algorithms", _determinism, _set_determinism, ((False, False),)),
        *(
            _attribute(cudnn, name, "cudnn", (default,))
            for name, default in (("enabled", True), ("benchmark", False), ("deterministic", False))
        ),
        _unless_mixed(_attribute(cudnn, "allow_tf32", "cudnn", (True,))),
        # after the settings whose writes change them
        Setting("float32 precisions", _precisions, _set_precisions, ((), _DEFAULT_PRECISIONS)),
        *_settings_of_torch(),
        Setting("activation budget", _activation_budget, _set_activation_budget, (1.0,)),
        Setting("sys.path", lambda: list(sys.path), lambda new: sys.path.__setitem__(slice(None), new)),
        Setting("sys.argv", lambda: list(sys.argv), lambda new: sys.argv.__setitem__(slice(None), new)),
        Setting("recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
        Setting("environment", lambda: dict(os.environ), _set_environment),
        Setting("working directory", _working_directory, _change_directory),
    )


def restored_settings() -> tuple[Setting, ...]:
    """Return the settings that are restored after a plan, but never set again for a capture."""
    return (
        *(_attribute(sys, name, "sys") for name in _OF_SYS if hasattr(sys, name)),
        _attribute(threading, "excepthook", "threading"),
        Setting("trace function", sys.gettrace, sys.settrace),
        Setting("profile function", sys.getprofile, sys.setprofile),
        Setting("switch interval", sys.getswitchinterval, sys.setswitchinterval),
        Setting("digits of integers", sys.get_int_max_str_digits, sys.set_int_max_str_digits),
        Setting("random", random.getstate, random.setstate),
        Setting("torch random", lambda: torch.get_rng_state().numpy().tobytes(), _set_rng_state),
        Setting("numpy random", _numpy_state, _set_numpy_state),
        Setting("gc", lambda: (gc.isenabled(), gc.get_threshold()), _set_gc),
        Setting("umask", _umask, os.umask),
        Setting("logging", _logging_state, _set_logging_state),
        Setting("socket timeout", socket.getdefaulttimeout, socket.setdefaulttimeout),
        Setting("locale", lambda: locale.setlocale(locale.LC_ALL), lambda name: _set_locale(name)),
        *_settings_of_unix(),
    )


def changed_settings() -> dict[str, str]:
    """Return the settings that influence traces and differ from their defaults, as a dict of name to repr."""
    values = {one.name: (one.read(), one.defaults) for one in reapplied_settings() if one.defaults}
    return {name: repr(value) for name, (value, defaults) in values.items() if value not in defaults}


_OF_SYS = ("stdin", "stdout", "stderr", "excepthook", "displayhook", "unraisablehook", "dont_write_bytecode")
_AUTOCAST_OFF = ((False, torch.float16), (False, torch.bfloat16), True)


def _settings_of_torch() -> Iterator[Setting]:
    """Yield the settings of torch's backends that this version of torch can both read and write."""
    for name, stem, *defaults in (
        ("flash attention", "sdp_use_flash", True),
        ("memory-efficient attention", "sdp_use_mem_efficient", True),
        ("math attention", "sdp_use_math", True),
        ("cuDNN attention", "sdp_use_cudnn", True),
        ("reduced math attention", "math_sdp_allow_fp16_bf16_reduction", False),
        ("attention order", "sdp_priority_order", [1, 2, 0, 3, 4]),
        ("linear algebra", "linalg_preferred_backend", *_enumerated("_LinalgBackend", "Default")),
        ("blas", "blas_preferred_backend", *_enumerated("_BlasBackend", "Default", "Cublas")),
        ("fp16 reduction", "cublas_allow_fp16_reduced_precision_reduction", (True, True), True),
        ("bf16 reduction", "cublas_allow_bf16_reduced_precision_reduction", (True, True), True),
        ("fp16 accumulation", "cublas_allow_fp16_accumulation", False),
        ("fill of uninitialized memory", "deterministic_fill_uninitialized_memory", True),
        ("mkldnn", "mkldnn_enabled", True),
    ):
        getter = _GETTERS.get(stem, f"_get_{stem}")
        read, write = getattr(torch._C, getter, None), getattr(torch._C, f"_set_{stem}", None)
        if read is not None and write is not None:
            yield Setting(name, read, _spread(write), tuple(defaults))


_GETTERS = {
    "sdp_use_flash": "_get_flash_sdp_enabled",
    "sdp_use_mem_efficient": "_get_mem_efficient_sdp_enabled",
    "sdp_use_math": "_get_math_sdp_enabled",
    "sdp_use_cudnn": "_get_cudnn_sdp_enabled",
}


def _enumerated(kind: str, *names: str) -> list[Any]:
    """Return the members `names` of the enumeration `torch._C.<kind>`, without members that torch lacks."""
    return [
        value for name in names if (value := getattr(getattr(torch._C, kind, None), name, None)) is not None
    ]


def _spread(write: Callable[..., object]) -> Callable[[Any], object]:
    return lambda values: write(*values) if isinstance(values, tuple) else write(values)


def _settings_of_unix() -> Iterator[Setting]:
    """Yield the settings that only Unix has.

    Signal handlers and timers are yielded only in the main thread.
    """
    if sys.platform == "win32":
        return
    yield Setting("signal mask", lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()), _set_signal_mask)
    if threading.current_thread() is threading.main_thread():
        yield Setting("signal handlers", _signal_handlers, _set_signal_handlers)
        yield Setting("timers", _armed_timers, _disarm_timers)
    import resource

    limits = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
    yield Setting(
        "resource limits",
        lambda: {one: resource.getrlimit(one) for one in limits},
        lambda values: _set_limits(resource, values),
    )


def _attribute(holder: Any, name: str, of: str, defaults: tuple[Any, ...] = ()) -> Setting:
    def write(value: Any) -> None:
        setattr(holder, name, value)

    return Setting(f"{of}.{name}", lambda: getattr(holder, name), write, defaults)


def _unless_mixed(setting: Setting) -> Setting:
    """Return a copy of a setting that reads None if torch raises RuntimeError.

    The copy ignores writes of None. torch raises after a program has set `fp32_precision`, another form of
    the setting, for a part of torch.
    """

    def read_or_none() -> Any:
        try:
            return setting.read()
        except RuntimeError:
            return None

    return setting._replace(
        read=read_or_none, write=lambda value: None if value is None else setting.write(value)
    )


def _precisions() -> tuple[str, ...]:
    """Return the value of `fp32_precision` for each backend and operator, or () before torch 2.9."""
    read = getattr(torch._C, "_get_fp32_precision_getter", None)
    return () if read is None else tuple(read(*place) for place in _PRECISIONS)


def _set_precisions(values: tuple[str, ...]) -> None:
    for place, value in zip(_PRECISIONS, values, strict=False):
        torch._C._set_fp32_precision_setter(*place, value)


def _determinism() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_determinism(values: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(values[0], warn_only=values[1])


def _default_device() -> torch.device | None:
    """Return the device set by `torch.set_default_device`, or None if it was not called.

    Devices set by `with torch.device(...)` do not count. A device of the capture that stands for the GPU is
    returned as the GPU, so that it stands for the GPU again once it is set again.
    """
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    if context is None:
        return None
    return torch.device("cuda") if getattr(context, "planner_is_gpu", False) else context.device


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
    """Return `activation_memory_budget` of functorch, or its default 1.0 if functorch is not imported.

    It is the share of activations that compiled code keeps.
    """
    config: Any = sys.modules.get("torch._functorch.config")
    return 1.0 if config is None else config.activation_memory_budget


def _set_activation_budget(share: float) -> None:
    config: Any = sys.modules.get("torch._functorch.config")
    if config is not None:
        config.activation_memory_budget = share


def _working_directory() -> Path | None:
    with suppress(OSError):  # it was removed
        return Path.cwd()
    return None


def _change_directory(folder: Path | None) -> None:
    if folder is not None:
        with suppress(OSError):
            os.chdir(folder)


def _set_rng_state(state: bytes) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _numpy_state() -> tuple[Any, ...] | None:
    """Return the state of NumPy's global random generator, or None if NumPy is not imported."""
    generators: Any = sys.modules.get("numpy.random")
    if generators is None:
        return None
    name, keys, *rest = generators.get_state()
    return name, keys.tolist(), *rest


def _set_numpy_state(state: tuple[Any, ...] | None) -> None:
    if state is not None:
        sys.modules["numpy.random"].set_state(state)


def _set_gc(state: tuple[bool, tuple[int, int, int]]) -> None:
    (gc.enable if state[0] else gc.disable)()
    gc.set_threshold(*state[1])


def _umask() -> int:
    """Return the process's umask, by setting another one briefly."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _logging_state() -> tuple[Any, ...]:
    root = logging.getLogger()
    return root.level, tuple(root.handlers), root.manager.disable, logging.raiseExceptions


def _set_logging_state(state: tuple[Any, ...]) -> None:
    root = logging.getLogger()
    level, handlers, disabled, logging.raiseExceptions = state
    root.setLevel(level)
    root.handlers[:] = handlers
    logging.disable(disabled)


def _set_locale(name: str) -> None:
    with suppress(locale.Error):
        locale.setlocale(locale.LC_ALL, name)


def _signal_handlers() -> dict[int, Any]:
    return {int(number): signal.getsignal(number) for number in signal.valid_signals()}


def _set_signal_handlers(handlers: Mapping[int, Any]) -> None:
    for number, handler in handlers.items():
        if handler is not None and signal.getsignal(number) is not handler:
            with suppress(OSError, ValueError):  # signals of the kernel, which cannot be changed
                signal.signal(number, handler)


def _set_signal_mask(mask: set[signal.Signals]) -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _armed_timers() -> frozenset[int]:
    timers = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
    return frozenset(int(one) for one in timers if signal.getitimer(one)[0])


def _disarm_timers(before: frozenset[int]) -> None:
    """Stop the armed timers that are not in `before`."""
    for one in _armed_timers() - before:
        signal.setitimer(one, 0)


def _set_limits(resource: Any, values: Mapping[int, tuple[int, int]]) -> None:
    for one, limits in values.items():
        if resource.getrlimit(one) != limits:
            with suppress(OSError, ValueError):  # a hard limit stays lowered
                resource.setrlimit(one, limits)
