"""Read and write an allocator history as compressed JSON of bounded size, with strict checks.

Layout (format 1): `actions` is a string with one letter per event, and `addresses` and `sizes` are columns.
`marks` is a list of [number of allocations before the mark, step, phase]. `streams` is a column if there are
several streams.
"""

import zlib
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from planner._support.atomic_write import write_bytes
from planner._support.gzip_text import pack, read_packed
from planner.allocator.history.history import ACTIONS, MOST_EVENTS, History, HistoryEvent, HistoryMark
from planner.errors import DataFileError
from planner.program import Phase

LARGEST_FILE_BYTES = 2**26  # of the unpacked content
LETTERS = dict(zip(ACTIONS, "arcsfmuox", strict=True))
ACTION_OF = {letter: action for action, letter in LETTERS.items()}

Count = Annotated[int, msgspec.Meta(ge=0)]
Letters = Annotated[str, msgspec.Meta(pattern=f"^[{''.join(ACTION_OF)}]*$", max_length=MOST_EVENTS)]


class _HistoryFile(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    format: Literal[1]
    gpu: str
    torch: str
    alloc_conf: str
    total_bytes: Count | None
    limit_bytes: Count | None
    actions: Letters
    addresses: list[Count]
    sizes: list[Count]
    marks: list[tuple[Count, Count, Phase]]
    streams: list[Count] = []


def save_history(history: History, path: Path) -> None:
    """Write a history, without sites, categories, notes and start state, to a file atomically.

    Equal histories give equal files. Raises DataFileError.
    """
    if len(history.events) > MOST_EVENTS:
        raise DataFileError(
            f"{path}: a history of {len(history.events)} events is not written; take fewer steps"
        )
    streams = [event.stream for event in history.events]
    content = _HistoryFile(
        1,
        history.gpu,
        history.torch,
        history.alloc_conf,
        history.total_bytes,
        history.limit_bytes,
        "".join(LETTERS[event.action] for event in history.events),
        [event.address for event in history.events],
        [event.size_bytes for event in history.events],
        [(mark.allocations, mark.step, mark.phase) for mark in history.marks],
        streams if any(streams) else [],
    )
    write_bytes(path, pack(msgspec.json.encode(content).decode()))


def load_history(path: Path) -> History:
    """Read a history from a file. Raises DataFileError for content that `save_history` never writes."""
    try:
        content = msgspec.json.decode(read_packed(path, LARGEST_FILE_BYTES), type=_HistoryFile)
        actions = (ACTION_OF[letter] for letter in content.actions)
        streams = content.streams or [0] * len(content.sizes)
        columns = zip(actions, content.addresses, content.sizes, streams, strict=True)
        events = tuple(
            HistoryEvent(action, address, size, stream=stream) for action, address, size, stream in columns
        )
    except OSError as error:
        raise DataFileError(f"{path}: cannot read the history: {error.strerror or error}") from error
    except (ValueError, RecursionError, zlib.error) as error:
        problem = " ".join(str(error).split())[:200]
        raise DataFileError(f"{path}: broken allocator history: {problem}; record it again") from error
    return History(
        content.gpu,
        content.torch,
        content.alloc_conf,
        content.total_bytes,
        content.limit_bytes,
        events,
        tuple(HistoryMark(*mark) for mark in content.marks),
    )
