"""Read and write published histories.

Such histories describe their job, and have no names of people, paths or hosts. The file is compressed JSON.
`events` has columns: `actions`, with one letter per event as in `file`; `addresses`; `sizes`; `streams`,
empty if there is only the default stream; `sites`, indices into the list of the same name, whose entries
begin with FILE:LINE and function. `segments_at_start` lists address, bytes, stream, pool and [offset, bytes,
"used" or "free"] blocks. Other fields name the source of the record and describe its job.
"""

import zlib
from pathlib import Path
from typing import Any, Literal

import msgspec

from planner._support.atomic_write import write_bytes
from planner._support.gzip_text import pack, read_packed
from planner.allocator.blocks import BlockState, PoolName, SegmentState
from planner.allocator.history.file import (
    ACTION_OF,
    LARGEST_FILE_BYTES,
    LETTERS,
    Count,
    Letters,
    load_history,
)
from planner.allocator.history.history import MOST_EVENTS, History, HistoryEvent
from planner.errors import DataFileError
from planner.program import Site

_UsedOrFree = Literal["used", "free"]


class _Events(msgspec.Struct):
    actions: Letters
    addresses: list[Count]
    sizes: list[Count]
    streams: list[Count] = []
    sites: list[int] = []


class _PublishedFile(msgspec.Struct, omit_defaults=True):
    events: _Events
    torch: str = "unknown"
    gpu: str = "unknown"
    alloc_conf: str = ""
    name: str = ""
    source: str = ""
    kind: str = ""
    device: int = 0
    begins: str = ""
    job: dict[str, Any] = {}
    letters: dict[str, str] = {}
    segments_at_start: list[tuple[Count, Count, Count, PoolName, list[tuple[Count, Count, _UsedOrFree]]]] = []
    sites: list[list[str]] = []


class _Kind(msgspec.Struct):
    format: int | None = None  # present only in a file of `save_history`


class PublishedHistory(msgspec.Struct, frozen=True):
    """A published history with its name, source and kind of job."""

    name: str
    source: str  # repository and file; "" if unknown
    kind: str  # the kind of job, in words
    history: History


def load_published(path: Path) -> PublishedHistory:
    """Read a published history from a file. Raises DataFileError for a file with other content."""
    try:
        content = msgspec.json.decode(read_packed(path, LARGEST_FILE_BYTES), type=_PublishedFile)
        history = _history(content)
    except OSError as error:
        raise DataFileError(f"{path}: cannot read the history: {error.strerror or error}") from error
    except (ValueError, RecursionError, zlib.error) as error:
        problem = " ".join(str(error).split())[:200]
        raise DataFileError(f"{path}: broken published history: {problem}; fetch it again") from error
    return PublishedHistory(
        content.name or path.name.removesuffix(".json.gz"), content.source, content.kind, history
    )


def load_any_history(path: Path) -> History:
    """Read a history in the format of `save_history` or `save_published`. Raises DataFileError."""
    try:
        is_ours = msgspec.json.decode(read_packed(path, LARGEST_FILE_BYTES), type=_Kind).format is not None
    except (OSError, ValueError, RecursionError, zlib.error):
        is_ours = True  # `load_history` reports the reason
    return load_history(path) if is_ours else load_published(path).history


def save_published(published: PublishedHistory, path: Path) -> None:
    """Write a published history to a file atomically and deterministically. Raises DataFileError."""
    history = published.history
    if len(history.events) > MOST_EVENTS:
        raise DataFileError(
            f"{path}: a history of {len(history.events)} events is not written; record fewer steps"
        )
    streams = [event.stream for event in history.events]
    content = _PublishedFile(
        _Events(
            "".join(LETTERS[event.action] for event in history.events),
            [event.address for event in history.events],
            [event.size_bytes for event in history.events],
            streams if any(streams) else [],
            [event.site for event in history.events],
        ),
        torch=history.torch,
        gpu=history.gpu,
        alloc_conf=history.alloc_conf,
        name=published.name,
        source=published.source,
        kind=published.kind,
        begins=beginning_of(history),
        letters={letter: action for action, letter in LETTERS.items()},
        segments_at_start=[_packed(state) for state in history.start],
        sites=[[f"{site.module} {site.op}", "", ""] for site in history.sites],
    )
    write_bytes(path, pack(msgspec.json.encode(content).decode()))


def beginning_of(history: History) -> str:
    """Return a label for the beginning of a history: "first tensor", "empty cache" or "midway".

    It is "first tensor" if the history starts without memory, "empty cache" if each segment has a block in
    use, and "midway" otherwise.
    """
    if not history.start:
        return "first tensor"
    has_cached_segment = any(not any(block.in_use for block in state.blocks) for state in history.start)
    return "midway" if has_cached_segment else "empty cache"


def _history(content: _PublishedFile) -> History:
    events = content.events
    count = len(events.actions)
    columns = zip(
        (ACTION_OF[letter] for letter in events.actions),
        events.addresses,
        events.sizes,
        events.sites or [-1] * count,
        events.streams or [0] * count,
        strict=True,
    )
    return History(
        content.gpu,
        content.torch,
        content.alloc_conf if ":" in content.alloc_conf else "",  # else a remark that it is unknown
        None,
        None,
        tuple(HistoryEvent(*columns) for columns in columns),
        sites=tuple(_site(site) for site in content.sites),
        start=tuple(_unpacked(*state) for state in content.segments_at_start),
    )


def _site(texts: list[str]) -> Site:
    place, _, function = (texts[0] if texts else "").partition(" ")
    return Site(place, function)


def _packed(state: SegmentState) -> tuple[int, int, int, PoolName, list[tuple[int, int, _UsedOrFree]]]:
    blocks: list[tuple[int, int, _UsedOrFree]] = [
        (block.address - state.address, block.size_bytes, "used" if block.in_use else "free")
        for block in state.blocks
    ]
    return state.address, state.size_bytes, state.stream, state.pool, blocks


def _unpacked(
    address: int, size_bytes: int, stream: int, pool: PoolName, blocks: list[tuple[int, int, _UsedOrFree]]
) -> SegmentState:
    """Convert an entry of the file to a segment. Raises ValueError if the blocks do not fill the segment."""
    end = 0
    for offset, block_bytes, _ in blocks:
        if offset != end or not block_bytes:
            raise ValueError(f"segments_at_start: the blocks of the segment at {address} leave a hole")
        end += block_bytes
    if end != size_bytes:
        raise ValueError(f"segments_at_start: the blocks of the segment at {address} do not fill it")
    states = (
        BlockState(address + offset, block_bytes, state == "used") for offset, block_bytes, state in blocks
    )
    return SegmentState(address, size_bytes, pool, tuple(states), stream)
