"""Nouns for the settings of a training framework, and the one function that reads a table of them.

Each setting is planned, without effect on GPU memory, stated in the answer, or refused. A table names every
setting of the installed library, which a test checks, so that a new one cannot be ignored in silence.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, TypeVar

from msgspec import Struct

from planner.errors import ModelError, PlannerError, UsageError, reason_of

T = TypeVar("T")

COMPILED = (
    "torch.compile is planned as eager code: compiled code fuses operators and usually keeps fewer "
    "activations, so that it usually takes less; with mode='reduce-overhead' its CUDA graphs take more"
)


class Effect(StrEnum):
    """The effect of a setting on a plan."""

    PLANNED = "planned"  # a field of the job follows from it
    NONE = "without effect"  # on GPU memory, or on what is planned
    STATED = "stated"  # not planned; the answer notes it wherever it is in use
    REFUSED = "refused"  # not planned, and too large to go on without


class Setting(Struct, frozen=True):
    """A setting of a framework."""

    name: str
    effect: Effect
    text: str = ""  # STATED: the sentence; REFUSED: why, and what to do
    when: Callable[[Any], object] | None = None  # whether it is in use; None: its value is not off


def planned(names: str) -> tuple[Setting, ...]:
    """Return settings that are planned."""
    return tuple(Setting(name, Effect.PLANNED) for name in names.split())


def harmless(names: str) -> tuple[Setting, ...]:
    """Return settings that change no GPU memory."""
    return tuple(Setting(name, Effect.NONE) for name in names.split())


def stated(name: str, text: str, when: Callable[[Any], object] | None = None) -> Setting:
    """Return a setting that the answer names."""
    return Setting(name, Effect.STATED, text, when)


def refused(name: str, text: str, when: Callable[[Any], object] | None = None) -> Setting:
    """Return a setting that ends the plan."""
    return Setting(name, Effect.REFUSED, text, when)


def notes_of(table: Iterable[Setting], source: object, owner: str) -> tuple[str, ...]:
    """Return the sentences of all settings that are in use and not planned; `source` has them as attributes,
    `owner` is its name. Raises UsageError for the first one that is refused.
    """
    notes = []
    for setting in table:
        if setting.effect not in (Effect.STATED, Effect.REFUSED):
            continue
        is_used = setting.when(source) if setting.when else getattr(source, setting.name, None)
        if is_used and setting.effect is Effect.REFUSED:
            raise UsageError(f"{owner}: {setting.name} is not planned: {setting.text}")
        if is_used:
            notes.append(f"{owner}: {setting.name}: {setting.text}")
    return tuple(notes)


def look_up(plans: Mapping[str, T], name: str, what: str) -> T:
    """Return the meaning of a name in a plan. Raises UsageError for one that is not planned."""
    if name not in plans:
        raise UsageError(f"{what} {name} is not planned; use one of {', '.join(plans)}")
    return plans[name]


def text_of(value: Any) -> str:
    """Return the text of a member of an enumeration, or of any other value."""
    return str(getattr(value, "value", value))


@contextmanager
def model_errors(what: str) -> Iterator[None]:
    """Raise ModelError for whatever goes wrong but for the planner's own errors."""
    try:
        yield
    except PlannerError:
        raise
    except Exception as error:
        raise ModelError(f"{what}: {reason_of(error)}") from error
