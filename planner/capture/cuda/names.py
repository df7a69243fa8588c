"""Replace names of torch temporarily.

They are replaced in torch itself and in users' modules that imported them.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from planner.capture.cuda.callers import modules_of_users
from planner.capture.cuda.threads import restrict_to_plan

Replacement = tuple[Any, str, Any]  # a module or class, a name of it, and the new value
_INHERITED = object()  # marks a name that was defined in a base class


class Names:
    """A set of replacements for names of torch, which are set and restored together."""

    def __init__(self, replacements: Iterable[Replacement]) -> None:
        shared: dict[tuple[int, int], Any] = {}  # torch compares some functions by identity
        self._before: list[Any] = []  # the original values while the names are replaced
        self._replacements = []
        for holder, name, new in replacements:
            plain = getattr(holder, name)
            chosen = restrict_to_plan(new, plain, lambda: bool(self._before))
            self._replacements.append((holder, name, shared.setdefault((id(new), id(plain)), chosen)))
        made = {id(getattr(holder, name)): new for holder, name, new in self._replacements if callable(new)}
        for module in modules_of_users():
            for name, value in list(vars(module).items()):
                if id(value) in made:
                    self._replacements.append((module, name, made[id(value)]))
        self._replacements.append((torch.jit, "script", self._scripting(torch.jit.script)))

    def replace(self) -> None:
        """Set the new values of all names."""
        self._before = [vars(holder).get(name, _INHERITED) for holder, name, _ in self._replacements]
        for holder, name, new in self._replacements:
            setattr(holder, name, new)

    def restore(self) -> None:
        """Restore the original values of all names."""
        for (holder, name, new), before in reversed([*zip(self._replacements, self._before, strict=True)]):
            if before is not _INHERITED:
                setattr(holder, name, before)
            elif vars(holder).get(name) is new:
                delattr(holder, name)
        self._before = []

    def _scripting(self, script: Callable[..., Any]) -> Callable[..., Any]:
        """Return a version of `torch.jit.script` that restores torch's names during its calls.

        `torch.jit.script` recognizes torch's functions by identity, and looks names of a class up in the
        frame of its caller.
        """

        @functools.wraps(script)
        def compile_with_own_names(*args: Any, _frames_up: int = 0, **kwargs: Any) -> Any:
            if not self._before:
                return script(*args, _frames_up=_frames_up + 1, **kwargs)
            self.restore()
            try:
                return script(*args, _frames_up=_frames_up + 1, **kwargs)
            finally:
                self.replace()

        return compile_with_own_names
