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


def restrict_to_plan(new: Any, plain: Any, is_replaced: Callable[[], bool] | None = None) -> Any:
    """Return a version of `new` that behaves as `plain` in other threads that run already.

    It also behaves as `plain` if `is_replaced` returns False: a module that is imported during a plan may
    bind it. Threads that a model starts later belong to the plan and see `new`. If no other thread runs and
    `is_replaced` is not given, or if `new` is not a function, method or property, `new` itself is returned.
    """
    bystanders = frozenset(one.ident for one in all_threads()) - {get_ident()}
    if not bystanders and is_replaced is None:
        return new
    if isinstance(new, staticmethod):
        return staticmethod(restrict_to_plan(new.__func__, plain, is_replaced))
    if isinstance(new, classmethod):
        return classmethod(restrict_to_plan(new.__func__, plain.__func__, is_replaced))

    def is_for_plan() -> bool:
        return get_ident() not in bystanders and (is_replaced is None or is_replaced())

    if isinstance(new, property):
        return property(lambda held: (new if is_for_plan() else plain).__get__(held))
    is_function = callable(new) and (isroutine(new) or isinstance(new, functools.partial))
    if not is_function or isinstance(plain, type) or not callable(plain):
        return new
    return _choosing(new, plain, is_for_plan)


def do_nothing(*_: Any) -> None:
    """Do nothing, in place of a plan's hook in another thread."""


def caller_frame(depth: int = 1) -> FrameType:
    """Return the frame of the calling function's caller, without counting frames of this module.

    `depth` is counted as in a call of `sys._getframe(depth)` by the calling function.
    """
    frame = sys._getframe(depth + 1)
    while frame.f_globals.get("__name__") == __name__ and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _choosing(new: Any, plain: Any, is_for_plan: Callable[[], bool]) -> Callable[..., Any]:
    @functools.wraps(new)
    def choose(*args: Any, **kwargs: Any) -> Any:
        return (new if is_for_plan() else plain)(*args, **kwargs)

    return choose
