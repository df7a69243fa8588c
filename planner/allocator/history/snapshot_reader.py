"""The pickle of `torch.cuda.memory._snapshot()` as a history; nothing in the file is ever executed.

A pickle may name any callable and have it called. Torch's snapshots hold plain containers, numbers and texts
only, for which no name is needed, so the first name in a file refuses it.
"""

import pickle
import pickletools
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from planner.allocator.history.history import ACTIONS, History, HistoryEvent
from planner.errors import DataFileError
from planner.program import Site

LARGEST_FILE_BYTES = 2**30  # with stacks, a history takes some kB an event
MOST_DEVICES = 64
# How long the argument of each opcode is; below zero pickletools' signs for those that encode it themselves.
_ARGUMENTS: Mapping[int, int] = {
    ord(opcode.code): 0 if opcode.arg is None else opcode.arg.n for opcode in pickletools.opcodes
}
_LENGTHS: Mapping[int, int] = {  # bytes of the length that such an argument begins with
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
_PUT, _LONG_BINPUT, _PAIRS = ord(b"p"), ord(b"r"), b"ci"  # GLOBAL and INST are followed by two lines
_CONF_KEYS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_THEIR_CODE = ("/torch/", "<")  # frames outside the user's code


class _Refusing(pickle.Unpickler):
    """Loads containers, numbers and texts, and no objects."""

    def find_class(self, module_name: str, global_name: str) -> NoReturn:
        raise ValueError(f"it names {module_name}.{global_name}, which no snapshot does")

    def persistent_load(self, pid: object) -> NoReturn:
        raise ValueError("it refers to objects outside of itself")


def load_snapshot(path: Path) -> History:
    """Read a snapshot whose history was recorded. Raises DataFileError."""
    try:
        with path.open("rb") as file:
            return _read(_unpickle(file))
    except OSError as error:
        raise DataFileError(f"{path}: cannot read the snapshot: {error.strerror or error}") from error
    except (
        *(ValueError, TypeError, LookupError, EOFError, AttributeError, RecursionError, OverflowError),
        *(pickle.UnpicklingError, MemoryError),
    ) as error:
        problem = " ".join(str(error).split())[:200] or type(error).__name__
        raise DataFileError(f"{path}: broken memory snapshot: {problem}; dump it anew") from error


def _unpickle(file: BinaryIO) -> dict[str, Any]:
    if file.seek(0, 2) > LARGEST_FILE_BYTES:
        raise ValueError(f"it is larger than {LARGEST_FILE_BYTES} bytes")
    file.seek(0)
    content = file.read()
    _refuse_far_places(content)
    snapshot = _Refusing(BytesIO(content)).load()
    if not isinstance(snapshot, dict) or not isinstance(snapshot.get("device_traces"), list):
        raise ValueError("no mapping with device_traces")
    return snapshot


def _refuse_far_places(content: bytes) -> None:
    """Refuse to remember an object at a place beyond what the file can hold: pickle makes room up to it."""
    position, end = 0, len(content)
    while position < end:
        code = content[position]
        position += 1
        size = _ARGUMENTS.get(code)
        if size is None:
            return  # no opcode, where pickle will stop
        start = position
        if size >= 0:
            position += size
        elif size in _LENGTHS:
            width = _LENGTHS[size]
            position += width + int.from_bytes(content[position : position + width], "little")
        else:
            for _ in range(2 if code in _PAIRS else 1):
                position = content.find(b"\n", position) + 1 or end
        if code in (_LONG_BINPUT, _PUT):
            argument = content[start:position]
            place = int.from_bytes(argument, "little") if code == _LONG_BINPUT else int(argument)
            if place > end:
                raise ValueError(f"it remembers an object at place {place} of {end} bytes")


def _read(snapshot: dict[str, Any]) -> History:
    traces = snapshot["device_traces"]
    if len(traces) > MOST_DEVICES or not all(isinstance(trace, list) for trace in traces):
        raise ValueError("device_traces: expected a list of events for each device")
    if not any(traces):
        raise ValueError("no history was recorded: call torch.cuda.memory._record_memory_history() first")
    device = max(range(len(traces)), key=lambda number: len(traces[number]))
    entries = [entry for entry in map(_entry, traces[device]) if entry["action"] in ACTIONS]
    sites: dict[Site, int] = {}
    streams: dict[object, int] = {0: 0}
    events = tuple(
        HistoryEvent(
            entry["action"],
            _count(entry, "addr"),
            _count(entry, "size"),
            sites.setdefault(_site(entry), len(sites)),
            streams.setdefault(entry.get("stream", 0), len(streams)),
        )
        for entry in entries
    )
    about = (f"GPU {device}", "unknown", _conf(snapshot), None, None)
    return History(*about, events, sites=tuple(sites), notes=tuple(_notes(traces)))


def _entry(entry: object) -> dict[str, Any]:
    if not isinstance(entry, dict) or not isinstance(entry.get("action"), str):
        raise ValueError("device_traces: an event without an action")
    return entry


def _count(entry: dict[str, Any], key: str) -> int:
    value = entry.get(key, 0)  # an `oom` has no address
    if type(value) is not int or not 0 <= value < 2**64:
        raise ValueError(f"device_traces: {key} {str(value)[:40]!r} is no size or address")
    return value


def _conf(snapshot: dict[str, Any]) -> str:
    """Return the allocator's options, which torch stores under either name."""
    settings = snapshot.get("allocator_settings", {})
    texts = [settings.get(key) for key in _CONF_KEYS] if isinstance(settings, dict) else []
    return next((text for text in texts if isinstance(text, str) and text), "")


def _site(entry: dict[str, Any]) -> Site:
    """Return the innermost frame of Python that is not torch's own."""
    frames = entry.get("frames", ())
    for frame in frames if isinstance(frames, list) else ():
        name = frame.get("filename") if isinstance(frame, dict) else None
        if isinstance(name, str) and name.endswith(".py") and not any(own in name for own in _THEIR_CODE):
            return Site(f"{'/'.join(name.split('/')[-2:])}:{frame.get('line')}", str(frame.get("name")))
    return Site("", "")


def _notes(traces: list[Any]) -> Iterator[str]:
    others = sum(1 for trace in traces if trace) - 1
    if others:
        yield f"the snapshot has {others} more devices, which are left out"
