"""Read-only stand-ins for Lightning's trainer.

They serve the `training_step` of a copied module. Steps read the trainer's plain state (epoch, counts, ranks,
the data module's numbers) and log. State is read from the real trainer, and logs are discarded. Anything that
acts is refused.
"""

from collections.abc import Mapping
from enum import Enum
from math import isinf
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any

from planner.capture import settings_of
from planner.errors import UsageError

_PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum, PurePath)
_MANY_BATCHES = 1_000  # replaces the infinite number of batches that a trainer has before the data is loaded


class Silent:
    """An object, such as a logger, that accepts any call and does nothing."""

    def __getattr__(self, name: str) -> "Silent":
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> "Silent":
        return self


class View:
    """A read-only view of an object's plain attributes, which raises UsageError for any other attribute.

    An infinite number reads as `_MANY_BATCHES`.
    """

    def __init__(self, viewed: Any, name: str) -> None:
        self.__dict__.update(_viewed=viewed, _name=name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(self._viewed, name)
        if not is_plain(value):
            raise UsageError(
                f"training_step reads {self._name}.{name}, which a plan does not have; keep what it needs in "
                "the module, or plan by hand with planner.max_batch"
            )
        return _MANY_BATCHES if isinstance(value, float) and isinf(value) else value

    def __setattr__(self, name: str, value: object) -> None:
        """Ignore the assignment. Nothing may change the real object while a plan is made."""

    def __deepcopy__(self, memo: object) -> "View":
        return self


class TrainerView(View):
    """A view of a trainer's plain attributes, with silent loggers, and optimizers without parameters."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer, "trainer")
        optimizers = [settings_of(one) for one in trainer.optimizers]
        data = getattr(trainer, "datamodule", None)
        self.__dict__.update(
            barebones=True,  # `log` returns at once
            logger=None if trainer.logger is None else Silent(),
            loggers=[Silent() for _ in trainer.loggers],
            progress_bar_callback=Silent(),
            optimizers=optimizers,
            strategy=SimpleNamespace(_lightning_optimizers=optimizers),
            lr_scheduler_configs=[],
            datamodule=None if data is None else View(data, "trainer.datamodule"),
        )


def is_plain(value: object) -> bool:
    """Return whether a value is a number, text, enumeration, path or None, or a container of these only."""
    if isinstance(value, Mapping):
        return all(is_plain(one) for pair in value.items() for one in pair)
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(is_plain, value))
    return isinstance(value, _PLAIN)
