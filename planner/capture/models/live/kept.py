"""Restore the modules of the caller that a plan moves to the meta device.

A function given to `planner.max_batch` may return a module that the caller trains, or a step that closes over
one. A capture moves its tensors to the meta device in place, since optimizers and closures hold them.
"""

import gc
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor, nn, optim
from torch.utils import swap_tensors


def living(*kinds: type) -> list[Any]:
    """Return the instances of the classes `kinds` that the garbage collector tracks.

    The classes of all objects are compared first, since a process has many objects and few classes.
    """
    objects = gc.get_objects()
    wanted = {kind for kind in set(map(type, objects)) if issubclass(kind, kinds)}
    return [one for one in objects if type(one) in wanted] if wanted else []


class LiveConstructor:
    """A caller's function that returns a model, with the modules and optimizers that existed before a plan.

    The captures of a plan share one search for them, since it visits all objects of the process.
    """

    def __init__(self, function: Callable[..., object]) -> None:
        self.function = function

    def __call__(self, **arguments: Any) -> object:
        """Call the function, and return its result."""
        return self.function(**arguments)

    def holders(self) -> list[nn.Module | optim.Optimizer]:
        """Return the modules and optimizers that existed at the first call of this method and still exist."""
        return [holder for one in self._found if (holder := one()) is not None]

    @cached_property
    def _found(self) -> list["weakref.ref[Any]"]:
        return list(map(weakref.ref, living(nn.Module, optim.Optimizer)))


class _Noted(NamedTuple):
    """A module or an optimizer, with a shallow copy of each dict and list that it holds.

    The parameter groups and the state of an optimizer are included.
    """

    holder: object
    containers: list[tuple[Any, Any]]

    @classmethod
    def of(cls, holder: nn.Module | optim.Optimizer) -> "_Noted":
        held = vars(holder)
        found: list[Any] = [held, *held.values()]
        if isinstance(holder, optim.Optimizer):
            for group in held.get("param_groups", ()):
                found += [group, *group.values()]
            found += held.get("state", {}).values()
        return cls(holder, [(one, copy(one)) for one in found if isinstance(one, dict | list)])

    def holds_any(self, ids: set[int]) -> bool:
        return any(
            id(value) in ids
            for _, before in self.containers
            for value in (before.values() if isinstance(before, dict) else before)
        )

    def restore(self) -> None:
        for container, before in self.containers:
            if isinstance(container, dict):
                container.clear()
                container.update(before)
            else:
                container[:] = before

    def replace(self, by_id: dict[int, Tensor]) -> None:
        for container, _ in self.containers:
            items = container.items() if isinstance(container, dict) else enumerate(container)
            for key, value in items:
                container[key] = by_id.get(id(value), value)


class _LiveState:
    """The state of modules and optimizers before a capture, and the tensors that the capture has moved."""

    def __init__(self) -> None:
        self._noted: list[_Noted] = []
        self._planned: set[int] = set()  # ids of the modules that are planned
        self._moved: list[tuple[Tensor, Tensor]] = []  # (tensor with the values, meta tensor)

    def note(self, holders: Iterable[nn.Module | optim.Optimizer]) -> None:
        """Note the attributes and the state of modules and optimizers, unless some are noted already."""
        if not self._noted:
            self._noted = list(map(_Noted.of, holders))

    def note_planned(self, model: nn.Module) -> None:
        """Note that a model and its submodules are planned, so that `restore` restores them."""
        self._planned |= {id(one) for one in model.modules()}

    def note_move(self, values: Tensor, moved: Tensor) -> None:
        """Note that a tensor was moved to the meta device in place.

        `values` holds the values of `moved`. Nothing is noted before `note` is called.
        """
        if self._noted:
            self._moved.append((values, moved))

    def has_moved(self) -> bool:
        """Return whether a tensor was moved since the state was noted."""
        return bool(self._moved)

    def restore(self) -> None:
        """Restore the planned modules, and each module and optimizer that holds a moved tensor.

        Others may belong to another thread.
        """
        ids = {id(moved) for _, moved in self._moved}
        changed = [one for one in self._noted if id(one.holder) in self._planned or one.holds_any(ids)]
        for one in changed:
            one.restore()
        stuck = {}
        while self._moved:
            values, moved = self._moved.pop()
            if not _swap(values, moved):
                stuck[id(moved)] = values
        for one in changed if stuck else ():
            one.replace(stuck)


def _swap(values: Tensor, moved: Tensor) -> bool:
    try:
        swap_tensors(moved, values)  # type: ignore[no-untyped-call]
    except RuntimeError:  # a graph or a weak reference holds it
        return False
    return True


_STATE: ContextVar[_LiveState | None] = ContextVar("live_state", default=None)


@contextmanager
def live_modules_restored() -> Iterator[None]:
    """Restore on exit the caller's modules and optimizers that captures in the context planned or changed.

    If the plan fails, the variables of its frames are cleared, since they may hold the moved tensors.
    """
    state = _LiveState()
    token = _STATE.set(state)
    try:
        yield
    except BaseException as error:
        if state.has_moved():
            _clear_frames(error)
        raise
    finally:
        _STATE.reset(token)
        state.restore()


def live_state() -> _LiveState:
    """Return the state that the enclosing `live_modules_restored` restores, or else an unused state."""
    return _STATE.get() or _LiveState()


def _clear_frames(error: BaseException) -> None:
    seen: set[int] = set()
    remaining: list[BaseException | None] = [error]
    while remaining:
        one = remaining.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            remaining += [one.__cause__, one.__context__]
