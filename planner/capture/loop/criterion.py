"""Build a user's loss (FILE.py:NAME).

The loss is called with the output, and with a target if it takes a target.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from planner.capture.models.meta_init import construct_on_meta
from planner.capture.models.user_code.file import open_file
from planner.capture.process_state import foreign_errors, message_of
from planner.errors import ModelError, UsageError
from planner.jobs import Job, Mode, is_code, kind_text


@dataclass(frozen=True, slots=True)
class Criterion:
    """A user's loss function or module, its name, and whether it takes a target."""

    call: Callable[..., Any]
    name: str  # FILE.py:NAME
    takes_target: bool
    is_without_target: bool  # the job has a target, but the loss does not take it

    def __call__(self, output: Any, target: Any) -> Tensor:
        """Return the loss of an output. Raises ModelError if the callable does not return a tensor."""
        loss = self.call(output, target) if self.takes_target else self.call(output)
        if not isinstance(loss, Tensor):
            raise ModelError(f"loss {self.name}: gives {kind_text(loss)}; return the loss as a tensor")
        return loss

    @property
    def module(self) -> nn.Module | None:
        """Return the loss, or None if it is not a module. The module's parameters and buffers take memory."""
        return self.call if isinstance(self.call, nn.Module) else None

    def notes(self) -> tuple[str, ...]:
        """Return a note if the target is unused, and a note if the loss has trained parameters."""
        notes = []
        if self.is_without_target:
            notes.append(f"the loss {self.name} takes the output alone: no target is copied to the GPU")
        if self.module is not None and any(one.requires_grad for one in self.module.parameters()):
            notes.append(f"the parameters of the loss {self.name} are trained with those of the model")
        return tuple(notes)


def build_criterion(job: Job) -> Criterion | None:
    """Return the user's loss with its tensors on meta, or None if the job names no code or does not train.

    A class, or a function that needs no argument, is called once and gives the loss. Raises UsageError if the
    file or a target is missing, or if the loss takes another number of arguments, ModelError if the code
    fails or makes an object that cannot be called.
    """
    if not is_code(job.loop.loss) or job.loop.mode is not Mode.TRAIN:
        return None
    name = str(job.loop.loss)
    loss, call_in_file = open_file(name, "loss")

    def explain(error: BaseException) -> ModelError:
        return ModelError(
            f"loss {name}: its construction fails: {type(error).__name__}: {message_of(error)[:200]}; "
            "name a callable that needs no arguments to be made"
        )

    with foreign_errors(explain):
        needs, most = _positional(loss)
        if isinstance(loss, type) or (needs == 0 and not isinstance(loss, nn.Module) and most < _ANY):
            made = construct_on_meta(lambda: call_in_file(loss))
        else:
            made = construct_on_meta(lambda: loss) if isinstance(loss, nn.Module) else loss
    if not callable(made):
        raise ModelError(f"loss {name}: expected a callable, got {kind_text(made)}; name a function")
    return _checked(made, name, job)


def _checked(made: Callable[..., Any], name: str, job: Job) -> Criterion:
    needs, most = _positional(made)
    has_target = job.samples.target is not None or bool(job.samples.targets)
    if needs > 2 or most < 1:
        raise UsageError(f"loss {name}: takes {needs} arguments; write it as (output, target) or (output)")
    if needs == 2 and not has_target:
        raise UsageError(
            f"loss {name}: takes an output and a target; give one sample, such as --target scalar:int64"
        )
    return Criterion(made, name, has_target and most > 1, has_target and most < 2)


_ANY = 2**31  # number of arguments that *args takes


def _positional(made: Any) -> tuple[int, int]:
    """Return the least and the greatest number of positional arguments of a callable; (1, 2) if unknown."""
    is_module = isinstance(made, nn.Module)
    try:
        parameters = inspect.signature(made.forward if is_module else made).parameters.values()
    except (TypeError, ValueError):  # for a builtin
        return 1, 2
    plain = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    has_any = any(one.kind is one.VAR_POSITIONAL for one in parameters)
    return sum(one.default is one.empty for one in plain), _ANY if has_any else len(plain)
