"""Replay histories that real GPUs recorded, through the simulated allocator, event by event.

    python -m benchmarks.accuracy.histories FOLDER                # exit code 0 if all agree to the last event
    python -m benchmarks.accuracy.histories FOLDER --torch 2.12   # by the rules of another version of torch
    python -m benchmarks.accuracy.histories FOLDER --counts       # write histories.csv for docs/accuracy.md

FOLDER holds published histories, NAME.json.gz each (planner/allocator/history/published_file.py). Each begins
with the memory that was reserved before it; CUDA's addresses and refusals are taken from the record.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from benchmarks.rows import write_rows
from planner.allocator.history import (
    History,
    HistoryCheck,
    PublishedHistory,
    beginning_of,
    check_history,
    load_published,
)
from planner.errors import PlannerError

COUNTS = Path(__file__).with_name("histories.csv")
OTHER_ORDER = "2.12"  # whose choice among equal free blocks no record here has
_UNKNOWN = "not named"


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of the events of one history, and whether its replay agrees."""

    name: str
    gpu: str  # as the record or its repository names it
    torch: str
    kind: str
    begins: str
    events: int
    allocations: int
    frees: int
    segment_events: int
    retries: int
    ooms: int
    emptied: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    agrees: bool
    agrees_with_other_order: bool


def replay(folder: Path, torch: str | None) -> Iterator[tuple[str, int, str, Counts | None]]:
    """Yield of each history its name, events, first difference (empty: none), and counts."""
    for path in sorted(folder.glob("*.json.gz")):
        try:
            published = load_published(path)
            check = check_history(_by_version(published, torch))
        except PlannerError as error:
            yield path.name, 0, str(error), None
            continue
        counts = _counts(published, check)
        yield published.name, counts.events, check.difference or "", counts


def _by_version(published: PublishedHistory, torch: str | None) -> History:
    history = published.history
    return history if torch is None else replace(history, torch=torch)


def _counts(published: PublishedHistory, check: HistoryCheck) -> Counts:
    history = published.history
    other = check_history(_by_version(published, OTHER_ORDER))
    return Counts(
        published.name,
        card_of(history.gpu),
        ".".join(history.torch.split(maxsplit=1)[0].split(".")[:2]),
        published.kind,
        beginning_of(history),
        len(history.events),
        check.allocations,
        check.frees,
        check.segment_events,
        check.retries,
        check.ooms,
        check.emptied,
        check.peak_allocated_bytes,
        check.peak_reserved_bytes,
        check.difference is None,
        other.difference is None,
    )


def card_of(text: str) -> str:
    """Return the card without the reasons for it.

    >>> card_of("NVIDIA H100 80GB (inferred: 60,982 MiB reserved)"), card_of("unknown 24 GB card (of 24,024)")
    ('NVIDIA H100 80GB, inferred', 'not named, 24 GB card')
    """
    card, _, reason = text.partition("(")
    card = card.partition(",")[0].strip()
    if card.startswith("unknown"):
        card = ", ".join(filter(None, (_UNKNOWN, card.removeprefix("unknown").strip(" :"))))
    return f"{card}, inferred" if reason.startswith("inferred") else card


def main() -> int:
    """Replay, print, count."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--torch", metavar="VERSION", help="the rules of this version, not the recorded one")
    parser.add_argument("--counts", action="store_true", help=f"write {COUNTS.name}")
    options = parser.parse_args()
    rows, agreed, total = [], 0, 0
    for name, events, difference, counts in replay(options.folder, options.torch):
        print(f"{name}: {events} events, {difference or 'agrees'}", flush=True)
        rows += [] if counts is None else [counts]
        agreed, total = agreed + (not difference), total + 1
    if not total:
        parser.error(f"{options.folder}: no history, which is a file NAME.json.gz")
    print(f"{agreed} of {total} agree")
    if options.counts:
        write_rows(COUNTS, Counts, rows)
    return 0 if agreed == total else 1


if __name__ == "__main__":
    sys.exit(main())
