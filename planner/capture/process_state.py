"""Restore the state of the process after a model's code has run in it.

A model's code may set the default dtype or environment variables, or leave inference mode on. During a
capture such changes hold, as they would on a GPU; afterwards the planner and its caller continue with the
previous state. Changes that Python cannot undo (patched modules, threads, a crash) require a separate
process: `planner.capture.subprocess`.
"""

import errno
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch.nn.modules import module as modules
from torch.optim import optimizer
from torch.utils import _device as device_mode

from planner.capture.patching import all_patched
from planner.capture.settings import reapplied_settings, restored_settings
from planner.errors import PlannerError

_ONE_PLAN = threading.RLock()
_HOOKS_OF_MODULES = (
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_forward_hooks_always_called",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)
_HOOKS_OF_OPTIMIZERS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")


@contextmanager
def preserve_process_state() -> Iterator[Callable[[], Callable[[], None]]]:
    """Restore settings and torch modes on exit; yield a function that notes the changes, to repeat them.

    The function notes the changes made before its call and returns a function that repeats them. Plans of
    several threads run one after another, since they replace functions of torch for the whole process.
    """
    with _ONE_PLAN:
        yield from _preserved()


def _preserved() -> Iterator[Callable[[], Callable[[], None]]]:
    settings = [(one.read, one.write, one.read()) for one in reapplied_settings()]
    restored_only = [(one.read, one.write, one.read()) for one in restored_settings()]
    restore_modes = _note_modes()

    def note_changes() -> Callable[[], None]:
        values = [(write, read(), before) for read, write, before in settings]

        def change() -> None:
            for write, value, before in values:
                if value != before:
                    write(value)

        return change

    try:
        with warnings.catch_warnings(), _process_kept(), torch.inference_mode(False):
            yield note_changes
    finally:
        restore_modes()
        for read, write, before in (*restored_only, *settings):
            if read() != before:
                write(before)


@contextmanager
def global_hooks_aside() -> Iterator[None]:
    """Remove global forward, backward and step hooks on modules and optimizers inside the context.

    Hooks that exist already, such as a profiler's, belong to a training run in this process, not to the
    plan. On exit they are restored, and hooks that were registered inside the context are gone.
    """
    owners = {modules: _HOOKS_OF_MODULES, optimizer: _HOOKS_OF_OPTIMIZERS}
    hooks: list[Any] = [getattr(owner, name) for owner, names in owners.items() for name in names]
    kept = [dict(one) for one in hooks]
    for one in hooks:
        one.clear()
    try:
        yield
    finally:
        for one, before in zip(hooks, kept, strict=True):
            one.clear()
            one.update(before)


@contextmanager
def _process_kept() -> Iterator[None]:
    """Make `os._exit`, `os.execv` and `os.execve` raise inside the context, instead of ending this process.

    Otherwise a model's code could choose the exit status that the caller sees. Children of this process end
    as usual.
    """
    owner, plain = os.getpid(), {name: getattr(os, name) for name in ("_exit", "execv", "execve")}

    def leave(status: int) -> NoReturn:
        if os.getpid() != owner:
            plain["_exit"](status)
        raise SystemExit(status)

    def execute(name: str) -> Callable[..., NoReturn]:
        def replace(path: Any, *arguments: Any) -> NoReturn:
            if os.getpid() != owner:
                plain[name](path, *arguments)
            raise OSError(errno.EPERM, "a plan does not let a model replace its process")

        return replace

    with all_patched(os, {"_exit": leave, "execv": execute("execv"), "execve": execute("execve")}):
        yield


def is_launched() -> bool:
    """Return whether WORLD_SIZE is set, as by torchrun and similar launchers in the processes they start."""
    return "WORLD_SIZE" in os.environ


def message_of(error: BaseException) -> str:
    """Return the message of an exception, or "" if its `__str__` raises."""
    try:
        return str(error)
    except Exception:
        return ""


@contextmanager
def foreign_errors(explain: Callable[[BaseException], PlannerError]) -> Iterator[None]:
    """Raise `explain(error)` for an error inside the context, except planner errors and interrupts.

    A KeyboardInterrupt passes even if it is behind another exception.
    """
    handled = sys.exception()
    try:
        yield
    except (PlannerError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise_interrupt(error, handled)
        raise explain(error) from error


def raise_interrupt(error: BaseException, handled: BaseException | None) -> None:
    """Raise the KeyboardInterrupt behind an exception, if there is one.

    It is sought in the exception's causes and contexts, up to `handled`, the exception that the caller was
    handling before.
    """
    behind = error.__cause__ or error.__context__
    while behind is not None and behind is not handled:
        if isinstance(behind, KeyboardInterrupt):
            raise behind
        behind = behind.__cause__ or behind.__context__


def first_line_of(error: BaseException) -> str:
    """Return "CLASS: FIRST LINE OF THE MESSAGE" of an exception, or only its class name without a message."""
    lines = message_of(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


# ---- modes


def _note_modes() -> Callable[[], None]:
    """Return a function that restores the thread's torch modes and default device as they are now.

    Dispatch modes and autocast regions that were exited meanwhile are not entered again.
    """
    inference, nesting = torch.is_inference_mode_enabled(), _autocast_nesting()
    functions, dispatch = _function_modes(), torch._C._len_torch_dispatch_stack()
    default, current = _default_device_context(), device_mode.CURRENT_DEVICE

    def restore() -> None:
        """Restore the thread's torch modes and default device as they were when `_note_modes` was called."""
        while torch._C._len_torch_dispatch_stack() > dispatch:
            torch._C._pop_torch_dispatch_stack(None)
        if _function_modes() != functions:
            while torch._C._len_torch_function_stack():
                torch._C._pop_torch_function_stack()
            for mode in functions:
                torch._C._push_on_torch_function_stack(mode)
        # Exiting the context would restore the planner's device, within which it was entered.
        torch._GLOBAL_DEVICE_CONTEXT.device_context = default
        device_mode.CURRENT_DEVICE = current
        while _autocast_nesting() > nesting:
            torch.autocast_decrement_nesting()
        if torch.is_inference_mode_enabled() != inference:
            # The model's code may hold the guard that would turn it off, so another guard sets it.
            torch._C._InferenceMode(inference).__enter__()  # type: ignore[no-untyped-call]

    return restore


def _default_device_context() -> Any:
    return getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)


def _autocast_nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _function_modes() -> list[Any]:
    return [torch._C._get_function_stack_at(index) for index in range(torch._C._len_torch_function_stack())]
