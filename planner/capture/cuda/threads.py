"""Replace functions of torch for a plan alone: threads that ran before it, such as a training, see theirs."""

import functools
import sys
from collections.abc import Callable
from threading import enumerate as all_threads, get_ident
from types import FrameType
from typing import Any


def beside_other_threads(new: Any, plain: Any) -> Any:
    """Return the replacement `new`, which is `plain` in threads that run already, if there are any.

    Threads that a model starts belong to the plan. Values, classes and other things that cannot answer
    differently stay as they are.
    """
    bystanders = frozenset(one.ident for one in all_threads()) - {get_ident()}
    if not bystanders:
        return new
    if isinstance(new, staticmethod):
        return staticmethod(beside_other_threads(new.__func__, plain))
    if isinstance(new, property):
        return property(lambda held: (plain if get_ident() in bystanders else new).__get__(held))
    if isinstance(new, type) or isinstance(plain, type) or not (callable(new) and callable(plain)):
        return new
    return _choosing(new, plain, bystanders)


def do_nothing(*_: Any) -> None:
    """Do nothing, in place of a hook."""


def caller_frame(depth: int = 1) -> FrameType:
    """Return the frame of the caller, as `sys._getframe` does; the choice between threads is no caller."""
    frame = sys._getframe(depth + 1)
    while frame.f_globals.get("__name__") == __name__ and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _choosing(new: Any, plain: Any, bystanders: frozenset[int | None]) -> Callable[..., Any]:
    @functools.wraps(new)
    def choose(*args: Any, **kwargs: Any) -> Any:
        return (plain if get_ident() in bystanders else new)(*args, **kwargs)

    return choose
