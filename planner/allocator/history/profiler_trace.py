"""Convert a trace of `torch.profiler` to a history of a GPU's allocator.

A trace made with `profile_memory=True` has an event for each block that is allocated or freed, with the
block's address and size and with the bytes allocated and reserved at that time. Operators, annotations and,
with `with_stack=True`, Python functions are time spans of their threads, which enclose a block's event. A
trace has no segments: the history's segment events have the changes of reserved memory as sizes, and 0 as
address.
"""

import re
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import field

from planner._support.bounded_read import read_bytes
from planner._support.gzip_text import read_packed
from planner.allocator.blocks import BlockState, SegmentState
from planner.allocator.history.history import History, HistoryEvent
from planner.allocator.history.stacks import NO_SITE, Origin, function_category
from planner.errors import DataFileError
from planner.program import Category, Site

LARGEST_TRACE_BYTES = 2**31
_BEGINNINGS = b'"schemaVersion"', b'"traceEvents"'
_GZIP, _GZIP_WINDOW = b"\x1f\x8b", 31
_OPERATORS = "cpu_op", "operator"  # the category of operators since torch 1.11, and before
_PYTHON, _ANNOTATION = "python_function", "user_annotation"
_SPANS = frozenset((*_OPERATORS, _PYTHON, _ANNOTATION))
_GPU = 1  # c10::DeviceType
_MADE_UP = 2**62  # beyond all addresses
_BACKWARD = "autograd::engine::evaluate_function: "
_FUNCTION = re.compile(r"(?P<file>[^<>]+\.py)\((?P<line>\d+)\): (?P<name>.+)")
_MODULE, _OPTIMIZER_STEP = "nn.Module: ", "Optimizer.step#"  # prefixes of spans' names
_NOT_OF_THE_USER = frozenset(("torch", "planner")) | sys.stdlib_module_names


class _Event(msgspec.Struct):
    name: str = ""
    cat: str = ""
    ph: str = ""
    ts: float = 0
    dur: float = 0
    tid: int | str = 0
    args: msgspec.Raw = msgspec.Raw(b"{}")


class _Function(NamedTuple):
    file: str
    line: str
    name: str
    is_of_user: bool


class _Device(msgspec.Struct):
    id: int = 0
    name: str = ""
    total_bytes: int | None = field(default=None, name="totalGlobalMem")


class _Trace(msgspec.Struct):
    events: list[_Event] = field(name="traceEvents")
    devices: list[_Device] = field(default_factory=list, name="deviceProperties")


class _Change(msgspec.Struct):
    """A memory change in a trace: an allocation, a free (of negative size) or a refused request."""

    size_bytes: int = field(name="Bytes")
    address: int = field(default=0, name="Addr")
    device: int = field(default=0, name="Device Id")
    kind: int = field(default=0, name="Device Type")
    allocated_bytes: int | None = field(default=None, name="Total Allocated")  # after the change
    reserved_bytes: int | None = field(default=None, name="Total Reserved")
    is_refused: bool = False
    site: Origin = NO_SITE, None


def is_profiler_trace(beginning: bytes) -> bool:
    """Return whether a file, which may be compressed, begins as a trace of torch.profiler does."""
    if beginning.startswith(_GZIP):
        try:
            beginning = zlib.decompressobj(_GZIP_WINDOW).decompress(beginning, 4096)
        except zlib.error:
            return False
    return beginning.lstrip().startswith(b"{") and any(key in beginning for key in _BEGINNINGS)


def load_profiler_trace(path: Path) -> History:
    """Read the history of the GPU with a failed request, or else with the highest peak, from a trace.

    Raises DataFileError for a file that cannot be read, and for a trace without memory of a GPU.
    """
    try:
        content = read_bytes(path, LARGEST_TRACE_BYTES)
        if content.startswith(_GZIP):
            content = read_packed(path, LARGEST_TRACE_BYTES)
        trace = msgspec.json.decode(content, type=_Trace)
        by_gpu = _changes(trace.events)
    except OSError as error:
        raise DataFileError(f"{path}: cannot read the trace: {error.strerror or error}") from error
    except (ValueError, RecursionError, zlib.error) as error:
        problem = " ".join(str(error).split())[:200]
        raise DataFileError(f"{path}: broken trace of torch.profiler: {problem}; export it again") from error
    if not by_gpu:
        raise DataFileError(
            f"{path}: the trace has no memory of a GPU: record it with torch.profiler.profile("
            "profile_memory=True), and with with_stack=True for lines of code"
        )
    gpu, changes = max(by_gpu.items(), key=_by_failure_and_peak)
    device = next((one for one in trace.devices if one.id == gpu), _Device())
    return _history(device.name or f"GPU {gpu}", device.total_bytes, changes)


def _by_failure_and_peak(item: tuple[int, list[_Change]]) -> tuple[bool, int]:
    changes = item[1]
    return any(one.is_refused for one in changes), max(one.allocated_bytes or 0 for one in changes)


def _changes(events: Sequence[_Event]) -> dict[int, list[_Change]]:
    """Return the memory changes of each GPU in order of time, with their sites."""
    spans: dict[int | str, list[_Event]] = defaultdict(list)
    moments: dict[int | str, list[tuple[float, _Change]]] = defaultdict(list)
    for event in events:
        if event.name in ("[memory]", "[OutOfMemory]"):
            change = msgspec.json.decode(event.args, type=_Change)
            if change.kind == _GPU:
                change.is_refused = event.name != "[memory]"
                moments[event.tid].append((event.ts, change))
        elif event.ph == "X" and event.cat.lower() in _SPANS:
            spans[event.tid].append(event)
    for thread, of_thread in moments.items():
        of_thread.sort(key=_time)
        _find_sites(of_thread, spans[thread])
    by_gpu: dict[int, list[_Change]] = defaultdict(list)
    for _, change in sorted((one for of_thread in moments.values() for one in of_thread), key=_time):
        by_gpu[change.device].append(change)
    return by_gpu


def _time(moment: tuple[float, _Change]) -> float:
    return moment[0]


def _find_sites(moments: Iterable[tuple[float, _Change]], spans: list[_Event]) -> None:
    """Set the site and category of each memory change of one thread, by the thread's spans around it."""
    spans.sort(key=lambda span: (span.ts, -span.dur))
    sites: dict[Origin, Origin] = {}
    around: list[_Event] = []
    at = 0
    for moment, change in moments:
        while at < len(spans) and spans[at].ts <= moment:
            around = [*_open(around, spans[at].ts), spans[at]]
            at += 1
        around = [*_open(around, moment)]
        site = _site(around), _category(around)
        change.site = sites.setdefault(site, site)


def _open(spans: Iterable[_Event], moment: float) -> Iterator[_Event]:
    return (span for span in spans if span.ts + span.dur >= moment)


def _site(around: Sequence[_Event]) -> Site:
    """Return the outermost operator and the user's innermost function around a memory change, as a site.

    Without such a function, the outermost annotation that does not mark a step of the profiler is taken.
    """
    operator = next((span.name for span in around if span.cat.lower() in _OPERATORS), "")
    operator = operator.removeprefix(_BACKWARD)
    for span in reversed(around):
        found = _function(span.name) if span.cat == _PYTHON else None
        if found is not None and found.is_of_user:
            place = f"{found.file}:{found.line}"
            return Site(f"{operator} ({place})" if operator else place, found.name)
    annotations = (span.name for span in around if span.cat == _ANNOTATION)
    return Site(operator, next((name for name in annotations if not name.startswith("ProfilerStep")), ""))


def _category(around: Sequence[_Event]) -> Category | None:
    """Return the category of the innermost span with a rule, or None. A rule may give None, too."""
    for span in reversed(around):
        if span.name.startswith(_BACKWARD):
            return Category.GRADIENT
        if span.name.startswith(_OPTIMIZER_STEP):
            return Category.OPTIMIZER
        if span.name.startswith(_MODULE):
            return Category.ACTIVATION
        found = _function(span.name) if span.cat == _PYTHON else None
        if found is not None:
            has_rule, category = function_category(found.file, found.name)
            if has_rule:
                return category
    return None


@lru_cache(maxsize=2**14)  # the same functions are around thousands of blocks
def _function(span: str) -> _Function | None:
    """Return the Python function that a span's name describes, or None."""
    found = _FUNCTION.fullmatch(span)
    if found is None:
        return None
    package = re.split(r"[/\\.]", found["file"], maxsplit=1)[0]
    return _Function(found["file"], found["line"], found["name"], package not in _NOT_OF_THE_USER)


def _history(gpu: str, total_bytes: int | None, changes: Sequence[_Change]) -> History:
    before, start = _start(changes)
    sites: dict[Origin, int] = {}
    events: list[HistoryEvent] = []
    reserved = start[0].size_bytes if start else 0
    for change in changes:
        site = sites.setdefault(change.site, len(sites))
        grown = 0 if change.reserved_bytes is None else change.reserved_bytes - reserved
        if grown:
            events.append(HistoryEvent("segment_alloc" if grown > 0 else "segment_free", 0, abs(grown)))
            reserved += grown
        if change.is_refused:
            events.append(HistoryEvent("oom", 0, change.size_bytes, site))
        elif change.size_bytes > 0:
            events.append(HistoryEvent("alloc", change.address, change.size_bytes, site))
        else:
            address = before.pop(change.address, change.address)  # the old block is freed first
            events.append(HistoryEvent("free_completed", address, -change.size_bytes, site))
    notes = ("a profiler's trace: sizes are of blocks; what was in use before is taken as adjacent blocks",)
    names, categories = tuple(site for site, _ in sites), tuple(category for _, category in sites)
    return History(gpu, "", "", total_bytes, None, tuple(events), (), names, notes, start, categories)


def _start(changes: Sequence[_Change]) -> tuple[dict[int, int], tuple[SegmentState, ...]]:
    """Return new addresses for the blocks that are older than the trace, and a segment with these blocks.

    The addresses are made up, and are keyed by recorded address. The segment is in a tuple, which is empty if
    no memory was reserved. Memory in use that is not freed in the trace is one block, and free reserved
    memory is another block.
    """
    born: set[int] = set()
    old: dict[int, int] = {}
    for change in changes:
        if change.size_bytes > 0 and not change.is_refused:
            born.add(change.address)
        elif change.size_bytes < 0 and change.address not in born:
            old.setdefault(change.address, -change.size_bytes)
        elif change.size_bytes < 0:
            born.discard(change.address)
    first = changes[0]
    used = max(0, (first.allocated_bytes or 0) - (0 if first.is_refused else first.size_bytes))
    rest = max(0, used - sum(old.values()))
    addresses: dict[int, int] = {}
    blocks: list[BlockState] = []
    at = _MADE_UP
    for address, size in (*old.items(), (0, rest)):
        if size:
            addresses[address] = at
            blocks.append(BlockState(at, size, in_use=True))
            at += size
    free = max(0, (first.reserved_bytes or 0) - (at - _MADE_UP))
    if free:
        blocks.append(BlockState(at, free, in_use=False))
    if not blocks:
        return {}, ()
    return addresses, (SegmentState(_MADE_UP, at + free - _MADE_UP, "large", tuple(blocks)),)
