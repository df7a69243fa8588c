"""Types for tables of a framework's settings, and functions that read the tables.

Each setting is planned, without effect on GPU memory, stated in the answer, or refused. A table names every
setting of the installed library, which a test checks, so that no new setting is silently ignored.
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
    "activations, so that it usually takes less, but compiling it takes a buffer as large as the GPU's L2 "
    "cache; with mode='reduce-overhead' its CUDA graphs take more"
)


class Effect(StrEnum):
    """How a plan treats a framework's setting: planned, without effect, stated in a note, or refused."""

    PLANNED = "planned"  # a field of the job follows from the setting
    NONE = "without effect"  # without effect on the GPU memory that is planned
    STATED = "stated"  # not planned; the answer notes it if it is in use
    REFUSED = "refused"  # not planned, and too large to ignore


class Setting(Struct, frozen=True):
    """A setting of a training framework, with its effect on a plan."""

    name: str
    effect: Effect
    text: str = ""  # the note of a stated setting; the reason and the remedy of a refused setting
    when: Callable[[Any], object] | None = None  # whether it is in use; None: if its value is true


def planned(names: str) -> tuple[Setting, ...]:
    """Return a setting with the effect `PLANNED` for each name.

    `names` is a text with the names, separated by spaces.
    """
    return tuple(Setting(name, Effect.PLANNED) for name in names.split())


def harmless(names: str) -> tuple[Setting, ...]:
    """Return a setting with the effect `NONE` for each name.

    `names` is a text with the names, separated by spaces.
    """
    return tuple(Setting(name, Effect.NONE) for name in names.split())


def stated(name: str, text: str, when: Callable[[Any], object] | None = None) -> Setting:
    """Return a setting noted as not planned if `when` holds or, without `when`, if its value is true.

    `text` is the note.
    """
    return Setting(name, Effect.STATED, text, when)


def refused(name: str, text: str, when: Callable[[Any], object] | None = None) -> Setting:
    """Return a setting that refuses the plan if `when` holds or, without `when`, if its value is true."""
    return Setting(name, Effect.REFUSED, text, when)


def notes_of(table: Iterable[Setting], source: object, owner: str) -> tuple[str, ...]:
    """Return a note for each setting of a table that is in use and has the effect `STATED`.

    `source` has the settings as attributes; `owner` is its name in messages. Raises UsageError for the first
    setting in use that is refused.
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
    """Return the value of `name` in a table, or raise UsageError if the table lacks the name.

    `what` describes the name in the message.
    """
    if name not in plans:
        raise UsageError(f"{what} {name} is not planned; use one of {', '.join(plans)}")
    return plans[name]


def text_of(value: Any) -> str:
    """Return an object as text; for a member of an enumeration, its value."""
    return str(getattr(value, "value", value))


@contextmanager
def model_errors(what: str) -> Iterator[None]:
    """Convert exceptions in the context to ModelError, except the errors of the planner."""
    try:
        yield
    except PlannerError:
        raise
    except Exception as error:
        raise ModelError(f"{what}: {reason_of(error)}") from error
