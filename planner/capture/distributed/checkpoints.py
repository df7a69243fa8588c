"""Replace sharded checkpoints by versions without files.

Only one rank's part of a checkpoint exists. `torch.distributed.checkpoint` copies shards to the CPU to write
them, and reads files into existing shards, so neither takes memory of the GPU (filesystem.py and
default_planner.py of 2.13).
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any

from planner.capture.cuda.names import Replacement


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
    """Call `state_dict` of each stateful object, as `save` does. Nothing is written."""
    for value in state_dict.values():
        if _has_state(value):
            value.state_dict()


def _async_save(state_dict: Mapping[str, Any], *_: Any, **__: Any) -> "Future[None]":
    _save(state_dict)
    done: Future[None] = Future()
    done.set_result(None)
    return done


def _load(state_dict: Mapping[str, Any], *_: Any, **__: Any) -> None:
    """Load each stateful object's own state into the object again.

    `load` does so after it reads the files.
    """
    for value in state_dict.values():
        if _has_state(value):
            value.load_state_dict(value.state_dict())


def _has_state(value: object) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
