"""Read histories from the pickle of `torch.cuda.memory._snapshot()`.

Nothing in the file is executed.
"""

import pickle
import struct
from collections.abc import Iterable, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from planner._support.bounded_read import open_regular
from planner.allocator.blocks import BlockState, PoolName, SegmentState
from planner.allocator.config import AllocatorConfig, parse_alloc_conf
from planner.allocator.history.history import History, HistoryEvent
from planner.allocator.history.snapshot_pickle import EventRows, SnapshotList, count_of, load_stream
from planner.allocator.history.start_state import UnequalStateError, start_before
from planner.errors import DataFileError, UsageError

LARGEST_FILE_BYTES = 2**35  # an event takes 100 to 200 bytes
MOST_DEVICES = 64
_CONF_KEYS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def load_snapshot(path: Path) -> History:
    """Read the history of the device with the most events. Raises DataFileError."""
    histories = with_events(load_snapshots(path), path)
    longest = max(histories, key=lambda history: len(history.events))
    others = len(histories) - 1
    if not others:
        return longest
    note = f"the snapshot has {others} more devices, which are left out"
    return replace(longest, notes=(note, *longest.notes))


def with_events(histories: Sequence[History], path: Path) -> tuple[History, ...]:
    """Return the histories of a snapshot that have events. Raises DataFileError if no device has events."""
    recorded = tuple(history for history in histories if history.events)
    if not recorded:
        problem = "no history was recorded: call torch.cuda.memory._record_memory_history() first"
        raise DataFileError(f"{path}: broken memory snapshot: {problem}; dump it again")
    return recorded


def load_snapshots(path: Path) -> tuple[History, ...]:
    """Read the history of each device that recorded events or has segments. Raises DataFileError.

    A history without events has the segments of the snapshot as its start.
    """
    try:
        with open_regular(path, LARGEST_FILE_BYTES) as file:
            return _read(_unpickle(file))
    except OSError as error:
        raise DataFileError(f"{path}: cannot read the snapshot: {error.strerror or error}") from error
    except (
        *(ValueError, TypeError, LookupError, EOFError, AttributeError, RecursionError, OverflowError),
        *(pickle.UnpicklingError, MemoryError, AssertionError, struct.error),
    ) as error:
        problem = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataFileError(f"{path}: broken memory snapshot: {problem}; dump it again") from error


def _unpickle(file: BufferedReader) -> dict[str, Any]:
    snapshot = load_stream(file)
    if not isinstance(snapshot, dict) or not isinstance(snapshot.get("device_traces"), list):
        raise ValueError("no mapping with device_traces")
    return snapshot


def _read(snapshot: dict[str, Any]) -> tuple[History, ...]:
    traces = snapshot["device_traces"]
    if len(traces) > MOST_DEVICES or not all(isinstance(trace, SnapshotList) for trace in traces):
        raise ValueError("device_traces: expected a list of events for each device")
    return tuple(
        _history(snapshot, device)
        for device, trace in enumerate(traces)
        if trace or trace.rows is not None or _segments(snapshot, device)
    )


def _history(snapshot: dict[str, Any], device: int) -> History:
    trace: SnapshotList = snapshot["device_traces"][device]
    if trace:
        raise ValueError("device_traces: an event without an action")
    rows = trace.rows or EventRows()
    segments = _segments(snapshot, device)
    streams = stream_numbers(rows.last, segments or ())
    events = tuple(event._replace(stream=streams[event.stream]) for event in rows.last)
    conf = _conf(snapshot)
    start: tuple[SegmentState, ...] = ()
    notes: tuple[str, ...] = ()
    if rows.count > len(events):
        notes = (f"of the {rows.count:,} events of the snapshot the last {len(events):,} are read",)
    if segments is not None:
        try:
            start = start_before(events, [_state(one, streams) for one in segments], _config(conf))
        except UnequalStateError as error:
            notes += (f"the segments of the snapshot are not those after its last event: {error}",)
    sites = tuple(site for site, _ in rows.sites)
    categories = tuple(category for _, category in rows.sites)
    return History(
        f"GPU {device}",
        "unknown",
        conf,
        None,
        None,
        events,
        sites=sites,
        notes=notes,
        start=start,
        categories=categories,
    )


def _segments(snapshot: dict[str, Any], device: int) -> list[dict[str, Any]] | None:
    """Return a device's segments, or None if the snapshot has no list of segments.

    Segments of CUDA graphs are left out.
    """
    segments = snapshot.get("segments")
    if not isinstance(segments, list) or not all(isinstance(one, dict) for one in segments):
        return None
    of_device = [one for one in segments if one.get("device", 0) == device]
    return [one for one in of_device if tuple(one.get("segment_pool_id", (0, 0))) == (0, 0)]


def stream_numbers(
    events: Iterable[HistoryEvent], segments: Iterable[dict[str, Any]] = ()
) -> dict[object, int]:
    """Return the number of each stream, by the stream's handle.

    The numbers are in the order in which torch releases streams. The default stream has number 0.
    """
    handles = {0, *(event.stream for event in events), *(count_of(one, "stream") for one in segments)}
    return {handle: number for number, handle in enumerate(sorted(handles))}


def _state(segment: dict[str, Any], streams: dict[object, int]) -> SegmentState:
    address = count_of(segment, "address")
    size_bytes = count_of(segment, "total_size")
    place = address
    blocks = []
    for block in segment["blocks"]:
        blocks.append(BlockState(place, count_of(block, "size"), block["state"] != "inactive"))
        place += blocks[-1].size_bytes
    if place != address + size_bytes:
        raise ValueError(f"segments: the blocks of the segment at {address:#x} do not fill it")
    pool: PoolName = "small" if segment.get("segment_type") == "small" else "large"
    return SegmentState(address, size_bytes, pool, tuple(blocks), streams[segment.get("stream", 0)])


def _config(conf: str) -> AllocatorConfig:
    """Parse the allocator options, or return the defaults if the options cannot be simulated."""
    try:
        return parse_alloc_conf(conf)
    except UsageError:
        return AllocatorConfig()


def _conf(snapshot: dict[str, Any]) -> str:
    """Return the text of the allocator's options, under either of two names, or "" if it is not stored."""
    settings = snapshot.get("allocator_settings", {})
    texts = [settings.get(key) for key in _CONF_KEYS] if isinstance(settings, dict) else []
    return next((text for text in texts if isinstance(text, str) and text), "")
