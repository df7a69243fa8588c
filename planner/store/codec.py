"""A trace as a file that one can attach to a bug report: compressed JSON, read strictly, never executed.

Layout: `kind` is a string with one letter per event (a, f, m: `Alloc`, `Free`, `Mark`); `alloc`,
`free`, `mark` and `sites` hold one column for each field of their class. Trace and job fit in one file, so
that it plans by itself. Format 2 has `details` as well, format 3 also says which blocks are `optional`; a
trace is written in the first that says all of it. Format 4 holds loops (`stored_loop`) in place of a trace:
in `traces` the own events of each, laid out as in format 3, in `loops` what kernels take beside them. Format
5 is format 3 with `asked`, the convolutions of workspaces. Format 6 is format 5, and format 7 format 4, with
`growth_sources` beside each trace.
"""

import json
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from planner._support.atomic_write import save
from planner._support.gzip_text import pack, read_packed
from planner.errors import DataFileError
from planner.program import (
    Alloc,
    ConvWorkspace,
    Event,
    Free,
    GrowthSource,
    PhaseStart,
    Site,
    TensorProvenance,
    Trace,
    check,
)

FORMAT, FORMAT_WITH_DETAILS, FORMAT_WITH_OPTIONAL, FORMAT_OF_LOOPS, FORMAT_WITH_ASKED = 1, 2, 3, 4, 5
FORMAT_WITH_GROWTH, FORMAT_OF_GROWING_LOOPS = 6, 7
LARGEST_FILE_BYTES = 2**28  # compressed or not; a ResNet-50 takes 10**5, and JSON in memory 20 times as much
LARGEST_NUMBER = 2**63 - 1  # what torch counts with
_OF_TRACE = ("batches", "unknown_ops", "notes", "sites", "kind", "alloc", "free", "mark")
_KEYS = ("format", "about", *_OF_TRACE)
_OF_WHOLE_TRACE = (*_OF_TRACE, "details")

T = TypeVar("T")
Said = dict[str, Any]  # JSON


@dataclass(frozen=True, slots=True)
class Saved:
    """What a file holds."""

    traces: tuple[Trace, ...]  # one; of loops, the own events of each
    loops: tuple[Said, ...]  # what `stored_loop` says of each beside them; none where the trace is whole
    about: Said


def save_trace(trace: Trace, path: Path, about: Said) -> None:
    """Write a trace and a JSON-able description of its job; whole or not at all, equal traces as equal bytes.

    Raises DataFileError where the file cannot be written, ValueError for a trace that `check` refuses.
    """
    document = {
        "format": FORMAT_WITH_DETAILS if trace.details else FORMAT,
        "about": about,
        **_document(trace),
    }
    if trace.asked or trace.growth_sources:
        document |= {"format": FORMAT_WITH_ASKED, "asked": _columns(ConvWorkspace, trace.asked)}
        if trace.growth_sources:
            document |= {"format": FORMAT_WITH_GROWTH, **_growth(trace)}
    elif any(isinstance(event, Alloc) and event.optional for event in trace.events):
        document["format"] = FORMAT_WITH_OPTIONAL
    else:
        del document["alloc"]["optional"]
        if not trace.details:
            del document["details"]
    _write(document, path)


def save_loops(loops: Sequence[tuple[Trace, Said]], path: Path, about: Said) -> None:
    """Write loops, each as its own events and what `loops_to_json` says beside them, as `save_trace` does.

    Raises as it does.
    """
    document = {
        "format": FORMAT_OF_LOOPS,
        "about": about,
        "traces": [_document(own) for own, _ in loops],
        "loops": [said for _, said in loops],
    }
    if any(own.growth_sources for own, _ in loops):
        document["format"] = FORMAT_OF_GROWING_LOOPS
        document["traces"] = [_document(own) | _growth(own) for own, _ in loops]
    _write(document, path)


def _growth(trace: Trace) -> Said:
    return {"growth_sources": _columns(GrowthSource, trace.growth_sources)}


def _document(trace: Trace) -> Said:
    check(trace)
    return {
        "batches": trace.batches,
        "unknown_ops": trace.unknown_ops,
        "notes": trace.notes,
        "sites": _columns(Site, trace.sites),
        "kind": "".join(map(_letter, trace.events)),
        "alloc": _columns(Alloc, trace.events),
        "free": _columns(Free, trace.events),
        "mark": _columns(PhaseStart, trace.events),
        "details": _columns(TensorProvenance, trace.details),
    }


def _write(document: Said, path: Path) -> None:
    save(path, pack(json.dumps(document, separators=(",", ":"), allow_nan=False)), "the trace")


def load_trace(path: Path) -> tuple[Trace, Said]:
    """Read a trace and the description of its job.

    Raises DataFileError for a file that cannot be read, for anything that `save_trace` never wrote, and for
    loops, which are no trace before one says of which batch size and GPU.
    """
    saved = load_saved(path)
    if saved.loops:
        raise DataFileError(f"{path}: holds loops in place of one trace; plan from it with --trace")
    return saved.traces[0], saved.about


def load_saved(path: Path) -> Saved:
    """Read what `save_trace` or `save_loops` wrote; the loops' own events are checked, `loops` is not.

    Raises DataFileError for a file that cannot be read and for anything else.
    """
    try:
        document = _unpack(path)
        about = document["about"]
        if not isinstance(about, dict):
            raise ValueError("about: no mapping")
        if document["format"] in (FORMAT_OF_LOOPS, FORMAT_OF_GROWING_LOOPS):
            return _loops(document)
        return Saved((_trace(document),), (), about)
    except OSError as error:
        raise DataFileError(f"{path}: cannot read the trace: {error.strerror or error}") from error
    except (ValueError, RecursionError, zlib.error) as error:
        raise DataFileError(f"{path}: broken trace file: {str(error)[:200]}; trace anew") from error


def _loops(document: Said) -> Saved:
    traces, loops = document["traces"], document["loops"]
    if not isinstance(traces, list) or not isinstance(loops, list) or not len(traces) == len(loops) > 0:
        raise ValueError("traces and loops are no lists of one length")
    if not all(isinstance(said, dict) for said in loops):
        raise ValueError("loops: no mapping")
    is_growing = document["format"] == FORMAT_OF_GROWING_LOOPS
    keys = (*_OF_WHOLE_TRACE, "growth_sources") if is_growing else _OF_WHOLE_TRACE
    own = tuple(_trace(_members("traces", keys, item)) for item in traces)
    return Saved(own, tuple(loops), document["about"])


def _trace(document: Said) -> Trace:
    trace = Trace(
        events=tuple(_events(document)),
        sites=tuple(_rows("sites", Site, document["sites"])),
        batches=tuple(_list("batches", int, document["batches"])),
        unknown_ops=tuple(_list("unknown_ops", str, document["unknown_ops"])),
        notes=tuple(_list("notes", str, document["notes"])),
        details=tuple(_rows("details", TensorProvenance, document["details"]))
        if "details" in document
        else (),
        asked=tuple(_rows("asked", ConvWorkspace, document["asked"])) if "asked" in document else (),
        growth_sources=tuple(_rows("growth_sources", GrowthSource, document["growth_sources"]))
        if "growth_sources" in document
        else (),
    )
    check(trace)
    return trace


def _letter(event: Event) -> str:
    return "m" if isinstance(event, PhaseStart) else type(event).__name__[0].lower()


def _columns(kind: type, rows: Iterable[object]) -> dict[str, list[Any]]:
    mine = [row for row in rows if isinstance(row, kind)]
    return {field.name: [getattr(row, field.name) for row in mine] for field in fields(kind)}


def _unpack(path: Path) -> Said:
    """The document, with the right keys and the right format."""
    text = read_packed(path, LARGEST_FILE_BYTES)
    document = json.loads(text.decode(), parse_constant=_finite, parse_float=_finite)
    found = document.get("format") if isinstance(document, dict) else None
    if type(found) is not int:
        raise ValueError("it names no format")
    if not FORMAT <= found <= FORMAT_OF_GROWING_LOOPS:
        raise ValueError(f"its format is {found}, this version reads {FORMAT} to {FORMAT_OF_GROWING_LOOPS}")
    if found in (FORMAT_OF_LOOPS, FORMAT_OF_GROWING_LOOPS):
        return _members("the document", ("format", "about", "traces", "loops"), document)
    keys = (*_KEYS, "details") if found >= FORMAT_WITH_DETAILS else _KEYS
    if found >= FORMAT_WITH_ASKED:
        keys = (*keys, "asked")
    if found == FORMAT_WITH_GROWTH:
        keys = (*keys, "growth_sources")
    return _with_optional(_members("the document", keys, document))


def _with_optional(document: Said) -> Said:
    """The document with the column that earlier formats have not got."""
    blocks = document["alloc"]
    if document["format"] >= FORMAT_WITH_OPTIONAL or not isinstance(blocks, dict):
        return document
    if "optional" in blocks:
        raise ValueError("alloc: unknown key 'optional'")
    numbers = blocks.get("block")
    none = [False] * len(numbers) if isinstance(numbers, list) else []
    return {**document, "alloc": {**blocks, "optional": none}}


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is no finite number")
    return number


def _events(document: Said) -> Iterator[Event]:
    columns: dict[str, list[Event]] = {
        "a": _rows("alloc", Alloc, document["alloc"]),
        "f": _rows("free", Free, document["free"]),
        "m": _rows("mark", PhaseStart, document["mark"]),
    }
    kind = document["kind"]
    if not isinstance(kind, str) or not set(kind) <= columns.keys():
        raise ValueError("kind: no text of the letters a, f and m")
    for letter, events in columns.items():
        if kind.count(letter) != len(events):
            raise ValueError(f"kind: {kind.count(letter)} times {letter}, but {len(events)} of such events")
    queues = {letter: iter(events) for letter, events in columns.items()}
    return (next(queues[letter]) for letter in kind)


def _rows(name: str, kind: type[T], value: object) -> list[T]:
    """Objects of a dataclass from their columns, each column read by the type of its field."""
    columns = fields(kind)  # type: ignore[arg-type]  # typeshed's type for dataclasses is private
    members = _members(name, [column.name for column in columns], value)
    lists = [_list(f"{name}.{column.name}", column.type, members[column.name]) for column in columns]
    if len({len(items) for items in lists}) > 1:
        raise ValueError(f"{name}: columns of unequal length")
    return [kind(*row) for row in zip(*lists, strict=True)]


def _members(name: str, keys: Iterable[str], value: object) -> dict[str, Any]:
    """A mapping that has these keys and no others."""
    if not isinstance(value, dict):
        raise ValueError(f"{name}: no mapping")
    for key in keys:
        if key not in value:
            raise ValueError(f"{name}: {key} is missing")
    if unknown := value.keys() - set(keys):
        raise ValueError(f"{name}: unknown key {min(unknown)!r}")
    return value


def _list(name: str, kind: Any, value: object) -> list[Any]:
    """A list of whole numbers, of truths, of texts, of members of an enumeration of texts, or of tuples of
    numbers.
    """
    if not isinstance(value, list):
        raise ValueError(f"{name}: no list")
    if kind == tuple[int, ...]:
        return [tuple(_list(name, int, item)) for item in value]
    wanted: type = kind if kind in (int, bool) else str
    for item in value:
        if type(item) is not wanted:
            raise ValueError(f"{name}: {type(item).__name__} found, {wanted.__name__} wanted")
        if isinstance(item, int) and abs(item) > LARGEST_NUMBER:
            raise ValueError(f"{name}: a number beyond {LARGEST_NUMBER}")
    try:
        return [kind(item) for item in value]
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
