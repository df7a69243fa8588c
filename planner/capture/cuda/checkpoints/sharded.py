"""Replace the functions that save and load sharded checkpoints by versions without files.

A planned script has no values to write, and of several ranks only one rank's part exists.
`torch.distributed.checkpoint` copies shards to the CPU to write them, and reads files into existing shards,
so neither takes memory of the GPU (filesystem.py and default_planner.py of 2.13).
"""

import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from planner.capture.cuda.names import Names, Replacement


@contextmanager
def sharded_without_files() -> Iterator[None]:
    """Make `torch.distributed.checkpoint`, if imported, save and load without files inside the context.

    The package is not imported here, since the import takes a second.
    """
    if "torch.distributed.checkpoint" not in sys.modules:
        yield
        return
    names = Names(replacements())
    names.replace()
    try:
        yield
    finally:
        names.restore()


def replacements() -> Iterator[Replacement]:
    """Yield replacements for `save`, `async_save` and `load` of `torch.distributed.checkpoint`."""
    from torch.distributed import checkpoint

    for holder, name, new in (
        (checkpoint.state_dict_saver, "save", _save),
        (checkpoint.state_dict_saver, "async_save", _async_save),
        (checkpoint.state_dict_loader, "load", _load),
    ):
        yield checkpoint, name, new
        yield holder, name, new


def _save(state_dict: Mapping[str, Any], *_: Any, **__: Any) -> None:
    """Call `state_dict` of each stateful object, as `save` does, but write nothing."""
    for value in state_dict.values():
        if _has_state(value):
            value.state_dict()


def _async_save(state_dict: Mapping[str, Any], *_: Any, **__: Any) -> "Future[None]":
    _save(state_dict)
    done: Future[None] = Future()
    done.set_result(None)
    return done


def _load(state_dict: Mapping[str, Any], *_: Any, **__: Any) -> None:
    """Load each stateful object's current state into it again, as `load` does with the state it reads."""
    for value in state_dict.values():
        if _has_state(value):
            value.load_state_dict(value.state_dict())


def _has_state(value: object) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
