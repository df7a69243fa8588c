"""Nouns for the settings of a training framework, and the one function that reads a table of them.

Each setting is planned, without effect on GPU memory, stated in the answer, or refused. A table names every
setting of the installed library, which a test checks, so that a new one cannot be ignored in silence.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from planner.errors import UsageError

COMPILED = (
    "torch.compile is planned as eager code: compiled code fuses operators and usually keeps fewer "
    "activations, so that it usually takes less; with mode='reduce-overhead' its CUDA graphs take more"
)


class Effect(StrEnum):
    """The effect of a setting on a plan."""

    PLANNED = "planned"  # a field of the job follows from it
    NONE = "without effect"  # on GPU memory, or on what is planned
    STATED = "stated"  # not planned; the answer says so wherever it is in use
    REFUSED = "refused"  # not planned, and too large to go on without


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of a framework."""

    name: str
    effect: Effect
    says: str = ""  # STATED: the sentence; REFUSED: why, and what to do
    when: Callable[[Any], bool] | None = (
        None  # whether it is in use; None: its value is neither empty nor off
    )
    harmless: tuple[object, ...] = ()  # values that change nothing, besides those


def planned(*names: str) -> tuple[Setting, ...]:
    """Return settings that are planned."""
    return tuple(Setting(name, Effect.PLANNED) for name in names)


def without_effect(*names: str) -> tuple[Setting, ...]:
    """Return settings that change no GPU memory."""
    return tuple(Setting(name, Effect.NONE) for name in names)


def stated(
    name: str, says: str, when: Callable[[Any], bool] | None = None, harmless: tuple[object, ...] = ()
) -> Setting:
    """Return a setting that the answer names."""
    return Setting(name, Effect.STATED, says, when, harmless)


def refused(
    name: str, says: str, when: Callable[[Any], bool] | None = None, harmless: tuple[object, ...] = ()
) -> Setting:
    """Return a setting that ends the plan."""
    return Setting(name, Effect.REFUSED, says, when, harmless)


def notes_of(table: Iterable[Setting], source: object, owner: str) -> tuple[str, ...]:
    """Return the sentences of all settings that are in use and not planned.

    `source` has the settings as attributes. Raises UsageError for the first one that is refused; `owner` is
    its object's name in the message.
    """
    notes = []
    for setting in table:
        if setting.effect not in (Effect.STATED, Effect.REFUSED) or not is_used(setting, source):
            continue
        if setting.effect is Effect.REFUSED:
            raise UsageError(f"{owner}: {setting.name} is not planned: {setting.says}")
        notes.append(f"{owner}: {setting.name}: {setting.says}")
    return tuple(notes)


def is_used(setting: Setting, source: object) -> bool:
    """Return whether the setting departs from what changes nothing."""
    if setting.when is not None:
        return setting.when(source)
    value = getattr(source, setting.name, None)
    return bool(value) and value not in setting.harmless
