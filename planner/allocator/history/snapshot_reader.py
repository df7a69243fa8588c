"""Read the pickle of `torch.cuda.memory._snapshot()` as histories, without executing anything in the file.

A pickle may name any callable and have it called. Torch's snapshots contain only containers, numbers and
texts, which need no name, so a file that names anything is refused.
"""

import pickle
import struct
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NoReturn

from msgspec.structs import replace

from planner._support.bounded_read import open_regular
from planner._support.conversion import shown
from planner.allocator.blocks import BlockState, PoolName, SegmentState
from planner.allocator.config import AllocatorConfig, parse_alloc_conf
from planner.allocator.history.history import ACTIONS, History, HistoryEvent
from planner.allocator.history.start_state import UnequalStateError, start_before
from planner.errors import DataFileError, UsageError
from planner.program import Site

LARGEST_FILE_BYTES = 2**30  # with stacks, an event takes some kB
MOST_DEVICES = 64
_MOST_BITS = 128  # of a number
_CONF_KEYS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_THEIR_CODE = ("/torch/", "<")  # frames outside the user's code


_Unpickler: Any = pickle._Unpickler  # has `stack` and `dispatch`, which its stub lacks


class _Refusing(_Unpickler):  # type: ignore[misc]
    """An unpickler that loads containers, numbers and texts, and refuses objects.

    It derives from the unpickler in Python, whose memory is bounded by the file's contents; the C version
    allocates memory for any memo index. Keys must be texts or numbers, since hashing tuples nested in doubled
    tuples never ends.
    """

    stack: list[Any]
    dispatch: ClassVar[dict[int, Any]] = dict(_Unpickler.dispatch)

    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        raise ValueError(f"it names {module_name}.{global_name}, which no snapshot does")

    def persistent_load(self, pid: object) -> NoReturn:
        raise ValueError("it refers to objects outside of itself")

    def set_item(self) -> None:
        """Set an item after checking its key."""
        _check_keys([self.stack[-2]])
        _Unpickler.load_setitem(self)

    def set_items(self) -> None:
        """Set items after checking their keys."""
        _check_keys(self.stack[::2])
        _Unpickler.load_setitems(self)

    def make_dict(self) -> None:
        """Make a dict after checking its keys."""
        _check_keys(self.stack[::2])
        _Unpickler.load_dict(self)

    def refuse(self) -> NoReturn:
        """Raise ValueError for a set, which would hash its elements."""
        raise ValueError("it has a set, which no snapshot has")

    dispatch[pickle.SETITEM[0]] = set_item
    dispatch[pickle.SETITEMS[0]] = set_items
    dispatch[pickle.DICT[0]] = make_dict
    for code in (pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET):
        dispatch[code[0]] = refuse


def _check_keys(keys: Sequence[object]) -> None:
    for key in keys:
        if not (isinstance(key, str) or (isinstance(key, int) and key.bit_length() <= _MOST_BITS)):
            raise ValueError("a key is neither a text nor a number")


def load_snapshot(path: Path) -> History:
    """Read the history of the snapshot's device with the most events. Raises DataFileError."""
    histories = with_events(load_snapshots(path), path)
    longest = max(histories, key=lambda history: len(history.events))
    others = len(histories) - 1
    if not others:
        return longest
    note = f"the snapshot has {others} more devices, which are left out"
    return replace(longest, notes=(note, *longest.notes))


def with_events(histories: Sequence[History], path: Path) -> tuple[History, ...]:
    """Return the histories of a snapshot that have events. Raises DataFileError if there are none."""
    recorded = tuple(history for history in histories if history.events)
    if not recorded:
        problem = "no history was recorded: call torch.cuda.memory._record_memory_history() first"
        raise DataFileError(f"{path}: broken memory snapshot: {problem}; dump it anew")
    return recorded


def load_snapshots(path: Path) -> tuple[History, ...]:
    """Read the history of each device that recorded events or has segments. Raises DataFileError.

    Without events a history has the segments of the snapshot as its start.
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
        raise DataFileError(f"{path}: broken memory snapshot: {problem}; dump it anew") from error


def _unpickle(file: BinaryIO) -> dict[str, Any]:
    snapshot = _Refusing(BytesIO(file.read())).load()  # it reads no more than the bytes of the file
    if not isinstance(snapshot, dict) or not isinstance(snapshot.get("device_traces"), list):
        raise ValueError("no mapping with device_traces")
    return snapshot


def _read(snapshot: dict[str, Any]) -> tuple[History, ...]:
    traces = snapshot["device_traces"]
    if len(traces) > MOST_DEVICES or not all(isinstance(trace, list) for trace in traces):
        raise ValueError("device_traces: expected a list of events for each device")
    return tuple(
        _history(snapshot, device)
        for device, trace in enumerate(traces)
        if trace or _segments(snapshot, device)
    )


def _history(snapshot: dict[str, Any], device: int) -> History:
    entries = [
        entry for entry in map(_entry, snapshot["device_traces"][device]) if entry["action"] in ACTIONS
    ]
    segments = _segments(snapshot, device)
    streams = _stream_numbers([*entries, *(segments or ())])
    sites: dict[Site, int] = {}
    events = tuple(
        HistoryEvent(
            entry["action"],
            _count(entry, "device_free" if entry["action"] == "oom" else "addr"),
            _count(entry, "size"),
            sites.setdefault(_site(entry), len(sites)),
            streams[_count(entry, "stream")],
        )
        for entry in entries
    )
    conf = _conf(snapshot)
    start: tuple[SegmentState, ...] = ()
    notes: tuple[str, ...] = ()
    if segments is not None:
        try:
            start = start_before(events, [_state(one, streams) for one in segments], _config(conf))
        except UnequalStateError as error:
            notes = (f"the segments of the snapshot are not those after its last event: {error}",)
    return History(
        f"GPU {device}", "unknown", conf, None, None, events, sites=tuple(sites), notes=notes, start=start
    )


def _segments(snapshot: dict[str, Any], device: int) -> list[dict[str, Any]] | None:
    """Return a device's segments that belong to no CUDA graph, or None if the snapshot lists none."""
    segments = snapshot.get("segments")
    if not isinstance(segments, list) or not all(isinstance(one, dict) for one in segments):
        return None
    of_device = [one for one in segments if one.get("device", 0) == device]
    return [one for one in of_device if tuple(one.get("segment_pool_id", (0, 0))) == (0, 0)]


def _stream_numbers(entries: list[dict[str, Any]]) -> dict[object, int]:
    """Return numbers of streams by handle, in the order in which torch releases them; 0 is the default."""
    handles = {_count(entry, "stream") for entry in entries}
    return {handle: number for number, handle in enumerate(sorted({0, *handles}))}


def _state(segment: dict[str, Any], streams: dict[object, int]) -> SegmentState:
    address = _count(segment, "address")
    size_bytes = _count(segment, "total_size")
    place = address
    blocks = []
    for block in segment["blocks"]:
        blocks.append(BlockState(place, _count(block, "size"), block["state"] != "inactive"))
        place += blocks[-1].size_bytes
    if place != address + size_bytes:
        raise ValueError(f"segments: the blocks of the segment at {address:#x} do not fill it")
    pool: PoolName = "small" if segment.get("segment_type") == "small" else "large"
    return SegmentState(address, size_bytes, pool, tuple(blocks), streams[segment.get("stream", 0)])


def _config(conf: str) -> AllocatorConfig:
    """Return the parsed allocator options, or the defaults if they are not simulated."""
    try:
        return parse_alloc_conf(conf)
    except UsageError:
        return AllocatorConfig()


def _entry(entry: object) -> dict[str, Any]:
    if not isinstance(entry, dict) or not isinstance(entry.get("action"), str):
        raise ValueError("device_traces: an event without an action")
    return entry


def _count(entry: dict[str, Any], key: str) -> int:
    value = entry.get(key, 0)  # an `oom` of older versions of torch has no free memory
    if type(value) is not int or not 0 <= value < 2**64:
        raise ValueError(f"device_traces: {key} is {shown(value)}, which is no size, address or stream")
    return value


def _conf(snapshot: dict[str, Any]) -> str:
    """Return the text of the allocator's options, which torch stores under one of two names."""
    settings = snapshot.get("allocator_settings", {})
    texts = [settings.get(key) for key in _CONF_KEYS] if isinstance(settings, dict) else []
    return next((text for text in texts if isinstance(text, str) and text), "")


def _site(entry: dict[str, Any]) -> Site:
    """Return the innermost frame of Python outside torch, or an empty site if there is none."""
    frames = entry.get("frames", ())
    for frame in frames if isinstance(frames, list) else ():
        name = frame.get("filename") if isinstance(frame, dict) else None
        if isinstance(name, str) and name.endswith(".py") and not any(own in name for own in _THEIR_CODE):
            line, function = frame.get("line"), frame.get("name")
            place = f"{'/'.join(name.split('/')[-2:])}:{line if isinstance(line, int) else '?'}"
            return Site(place, function if isinstance(function, str) else "?")
    return Site("", "")
