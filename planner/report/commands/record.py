"""The report of `planner record`, on a snapshot's histories and the files written."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from planner.allocator.history import History, HistoryCheck, beginning_of
from planner.report.document import Block, Bullets, Document, Entry, Headline, Paragraph
from planner.report.units import SCHEMA, mib, mib_text

_NEXT = "Nothing else is in the file, and nothing is sent: attach it to an issue, or add it to a pull request"
_MOST_SITES = 12


class RecordedHistory(Protocol):
    """A history of allocator events and the result of replaying it."""

    @property
    def history(self) -> History: ...

    @property
    def check(self) -> HistoryCheck: ...


def record_document(source: Path, recorded: Sequence[RecordedHistory], written: Sequence[Path]) -> Document:
    """Return the report of `planner record`: facts on each history, and the files written."""
    count = f"{len(recorded)} {'history' if len(recorded) == 1 else 'histories'}"
    answer = f"Written: {', '.join(map(str, written))}" if written else f"{count}; name --out to write"
    sections: list[list[Block]] = [[Headline((answer,), "good" if written else "neutral")]]
    for one in recorded:
        sections.append([*_entries(one.history, one.check)])
        if one.history.notes:
            sections.append([Bullets("Noted", one.history.notes)])
    return Document.of(*sections, [Paragraph(_NEXT, "faint")] if written else [])


def _entries(history: History, check: HistoryCheck) -> Iterator[Block]:
    yield Entry("GPU", history.gpu)
    yield Entry("torch", history.torch)
    yield Entry("Options", history.alloc_conf or "none")
    in_use, reserved = _start_bytes(history)
    held = f", {mib_text(in_use)} MiB in use of {mib_text(reserved)} MiB reserved" if reserved else ""
    yield Entry("Begins", f"{beginning_of(history)}{held}")
    kinds = {
        "allocations": check.allocations,
        "frees": check.frees,
        "changes of segments": check.segment_events,
        "retries": check.retries,
        "out-of-memory errors": check.ooms,
        "emptied caches": check.emptied,
    }
    yield Entry("Events", ", ".join(f"{number:,} {what}" for what, number in kinds.items() if number))
    peaks = check.peak_allocated_bytes, check.peak_reserved_bytes
    yield Entry("Peaks", f"{mib_text(peaks[0])} MiB allocated, {mib_text(peaks[1])} MiB reserved")
    if check.refused_bytes is not None:
        yield Entry("CUDA refused", f"{mib_text(check.refused_bytes)} MiB reserved, which would be too much")
    places = _places(history)
    more = f" and {len(places) - _MOST_SITES} more" if len(places) > _MOST_SITES else ""
    yield Entry("Code named", (", ".join(places[:_MOST_SITES]) or "none") + more)
    yield Entry("Replay", check.difference or "the simulated allocator agrees to the last event")


def _start_bytes(history: History) -> tuple[int, int]:
    blocks = [block for state in history.start for block in state.blocks if block.in_use]
    return sum(block.size_bytes for block in blocks), sum(state.size_bytes for state in history.start)


def _places(history: History) -> list[str]:
    """Return the distinct lines of code that a history names, with their functions."""
    return list(dict.fromkeys(f"{site.module} {site.op}".strip() for site in history.sites if site.module))


def record_to_json(
    source: Path, recorded: Sequence[RecordedHistory], written: Sequence[Path]
) -> dict[str, Any]:
    """Return the JSON object of `planner record`."""
    return {
        "schema": SCHEMA,
        "source": str(source),
        "histories": [_to_json(one.history, one.check) for one in recorded],
        "written": [str(path) for path in written],
    }


def _to_json(history: History, check: HistoryCheck) -> dict[str, Any]:
    in_use, reserved = _start_bytes(history)
    return {
        "gpu": history.gpu,
        "torch": history.torch,
        "alloc_conf": history.alloc_conf,
        "begins": beginning_of(history),
        "start_allocated_mib": mib(in_use),
        "start_reserved_mib": mib(reserved),
        "events": len(history.events),
        "allocations": check.allocations,
        "frees": check.frees,
        "segment_events": check.segment_events,
        "retries": check.retries,
        "out_of_memory": check.ooms,
        "emptied_caches": check.emptied,
        "peak_allocated_mib": mib(check.peak_allocated_bytes),
        "peak_reserved_mib": mib(check.peak_reserved_bytes),
        "refused_mib": None if check.refused_bytes is None else mib(check.refused_bytes),
        "code": _places(history),
        "difference": check.difference,
        "notes": list(history.notes),
    }
