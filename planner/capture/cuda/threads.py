"""Replace functions of torch only for the threads of a plan.

Threads that already run see the originals.
"""

import functools
import sys
from collections.abc import Callable
from inspect import isroutine
from threading import enumerate as all_threads, get_ident
from types import FrameType
from typing import Any


def beside_other_threads(new: Any, plain: Any) -> Any:
    """Return a version of `new` that behaves as `plain` in other running threads.

    Threads that a model starts later belong to the plan and see `new`. If no other thread runs, or if `new`
    is not a function, method or property, `new` itself is returned.
    """
    bystanders = frozenset(one.ident for one in all_threads()) - {get_ident()}
    if not bystanders:
        return new
    if isinstance(new, staticmethod):
        return staticmethod(beside_other_threads(new.__func__, plain))
    if isinstance(new, classmethod):
        return classmethod(beside_other_threads(new.__func__, plain.__func__))
    if isinstance(new, property):
        return property(lambda held: (plain if get_ident() in bystanders else new).__get__(held))
    is_function = callable(new) and (isroutine(new) or isinstance(new, functools.partial))
    if not is_function or isinstance(plain, type) or not callable(plain):
        return new
    return _choosing(new, plain, bystanders)


def do_nothing(*_: Any) -> None:
    """Do nothing, in place of a plan's hook in another thread."""


def caller_frame(depth: int = 1) -> FrameType:
    """Return the frame of the caller, without counting frames of this module.

    `depth` is counted as in `sys._getframe(depth)`.
    """
    frame = sys._getframe(depth + 1)
    while frame.f_globals.get("__name__") == __name__ and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _choosing(new: Any, plain: Any, bystanders: frozenset[int | None]) -> Callable[..., Any]:
    @functools.wraps(new)
    def choose(*args: Any, **kwargs: Any) -> Any:
        return (plain if get_ident() in bystanders else new)(*args, **kwargs)

    return choose
