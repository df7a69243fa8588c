"""Find the script line and the module that a thread is running."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

_OTHERS = (
    "site-packages",
    "dist-packages",
    f"{os.sep}lib{os.sep}python",
    "planner/emulator/",
    "torchinductor",
)
_OF_MODULES = ("_call_impl", "forward")  # functions whose first argument is the module that runs


def is_own(path: str) -> bool:
    """Return whether a file belongs to the script. Files of torch, installed packages and Python do not."""
    return Path(path).is_file() and not any(part in path for part in _OTHERS)


def place(torch: Any) -> dict[str, Any]:
    """Return a dict of the phase, the module and the line of the script that this thread is running.

    In a thread that runs no script, which is autograd's, the phase is "backward", the module is "" and the
    line is the main thread's. In other threads the phase is "optimizer" if an optimizer's step runs and no
    module does, else "". No frame is held after the return, since a frame keeps the tensors in its variables
    alive. So the list of frames begins with the caller's frame: only Python's garbage collector would free a
    list that holds this function's own frame.
    """
    frames = _frames(sys._getframe(1))
    in_backward = not any(is_own(frame.f_code.co_filename) for frame in frames)
    if in_backward:
        main = sys._current_frames().get(threading.main_thread().ident or 0)
        frames = _frames(main) if main is not None else []
    frames.reverse()  # the outermost first
    module = "" if in_backward else _module_path(torch, frames)
    in_step = not module and any(
        frame.f_code.co_name == "step" and isinstance(_first_argument(frame), torch.optim.Optimizer)
        for frame in frames
    )
    phase = "backward" if in_backward else "optimizer" if in_step else ""
    return {"phase": phase, "module": module, "line": line_of(frames)}


def line_of_caller() -> str:
    """Return the line of the script (FILE:LINE) that this thread runs, or "" if it runs no script."""
    frames = _frames(sys._getframe(1))
    frames.reverse()
    return line_of(frames)


def _frames(frame: Any) -> list[Any]:
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def line_of(frames: list[Any]) -> str:
    """Return the innermost line of the script (FILE:LINE), or "" if no frame belongs to the script.

    `frames` begin with the outermost frame.
    """
    own = next((frame for frame in reversed(frames) if is_own(frame.f_code.co_filename)), None)
    return "" if own is None else f"{own.f_code.co_filename}:{own.f_lineno}"


def _module_path(torch: Any, frames: list[Any]) -> str:
    """Return the dotted name of the innermost running module, or "" if no module runs.

    The name is relative to the outermost module. The name of its class is returned if the innermost module is
    the outermost, or is not inside of it.
    """
    running = [_first_argument(frame) for frame in frames if frame.f_code.co_name in _OF_MODULES]
    modules = [one for one in running if isinstance(one, torch.nn.Module)]
    if not modules:
        return ""
    names = {id(module): name for name, module in modules[0].named_modules()}
    return str(names.get(id(modules[-1])) or type(modules[-1]).__name__)


def _first_argument(frame: Any) -> Any:
    """Return a frame's first argument, or None if there are no arguments.

    In a method, the first argument is the object.
    """
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    if not names:
        return None
    variables = frame.f_locals
    first = variables.get(names[0])
    if isinstance(variables, dict):  # before Python 3.13, a copy that the frame keeps alive
        variables.clear()
    return first
