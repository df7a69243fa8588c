"""An allocator history as a file: compressed JSON of bounded size, read strictly.

Layout (format 1): `actions` is a string with one letter per event, `addresses` and `sizes` are columns;
`marks` is a list of [allocations before it, step, phase].
"""

import json
import zlib
from pathlib import Path
from typing import Any

from planner._support.atomic_write import write_bytes
from planner._support.gzip_text import pack, read_packed
from planner.allocator.history.history import ACTIONS, History, HistoryEvent, HistoryMark
from planner.errors import DataFileError
from planner.program import Phase

FORMAT = 1
MOST_EVENTS = 400_000  # three steps of a ResNet-50 have 20,000
LARGEST_FILE_BYTES = 2**26  # unpacked
_LETTERS = dict(zip(ACTIONS, "arcsfmuox", strict=True))
_ACTION_OF = {letter: action for action, letter in _LETTERS.items()}
_KEYS = {"format", "gpu", "torch", "alloc_conf", "total_bytes", "limit_bytes", "actions", "addresses"} | {
    "sizes",
    "marks",
}


def save_history(history: History, path: Path) -> None:
    """Write a history, whole or not at all; equal histories as equal bytes. Raises DataFileError."""
    if len(history.events) > MOST_EVENTS:
        raise DataFileError(
            f"{path}: a history of {len(history.events)} events is not written; take fewer steps"
        )
    document = {
        "format": FORMAT,
        "gpu": history.gpu,
        "torch": history.torch,
        "alloc_conf": history.alloc_conf,
        "total_bytes": history.total_bytes,
        "limit_bytes": history.limit_bytes,
        "actions": "".join(_LETTERS[event.action] for event in history.events),
        "addresses": [event.address for event in history.events],
        "sizes": [event.size_bytes for event in history.events],
        "marks": history.marks,
    }
    write_bytes(path, pack(json.dumps(document, separators=(",", ":"))))


def load_history(path: Path) -> History:
    """Read a history. Raises DataFileError for anything that `save_history` never wrote."""
    try:
        return _history(_unpack(path))
    except OSError as error:
        raise DataFileError(f"{path}: cannot read the history: {error.strerror or error}") from error
    except (ValueError, TypeError, RecursionError, zlib.error) as error:
        problem = " ".join(str(error).split())[:200]
        raise DataFileError(f"{path}: broken allocator history: {problem}; record it anew") from error


def _unpack(path: Path) -> dict[str, Any]:
    document = json.loads(read_packed(path, LARGEST_FILE_BYTES))
    if not isinstance(document, dict) or document.get("format") != FORMAT or document.keys() != _KEYS:
        raise ValueError(f"no history of format {FORMAT}")
    return document


def _history(said: dict[str, Any]) -> History:
    texts = [said[name] for name in ("gpu", "torch", "alloc_conf", "actions")]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("gpu, torch, alloc_conf and actions are texts")
    gpu, torch, alloc_conf, letters = texts
    unknown = set(letters) - _ACTION_OF.keys()
    if unknown:
        raise ValueError(f"actions: unknown letter {min(unknown)!r}")
    addresses, sizes = _counts("addresses", said["addresses"]), _counts("sizes", said["sizes"])
    if not len(letters) == len(addresses) == len(sizes) <= MOST_EVENTS:
        raise ValueError("actions, addresses and sizes are not equally long, or too long")
    events = zip((_ACTION_OF[letter] for letter in letters), addresses, sizes, strict=True)
    return History(
        gpu,
        torch,
        alloc_conf,
        _count_or_none("total_bytes", said["total_bytes"]),
        _count_or_none("limit_bytes", said["limit_bytes"]),
        tuple(HistoryEvent(*event) for event in events),
        tuple(_mark(mark) for mark in said["marks"]),
    )


def _mark(said: object) -> HistoryMark:
    if not isinstance(said, list) or len(said) != 3:
        raise ValueError("marks: [allocations, step, phase] is wanted")
    allocations, step = _counts("marks", said[:2])
    return HistoryMark(allocations, step, Phase(said[2]))


def _counts(name: str, values: object) -> list[int]:
    if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"{name}: a list of whole numbers is wanted")
    return values


def _count_or_none(name: str, value: object) -> int | None:
    return None if value is None else _counts(name, [value])[0]
