"""Where CUDA places segments in records of real GPUs, and what the choice is worth to reserved memory.

    python -m benchmarks.accuracy.addresses FOLDER          # a line a record; --counts writes them to a file

Before torch 2.12 the lowest of equal free blocks is reused, so that addresses can decide what is reserved.
Each record's requests are replayed once with addresses that rise and once with addresses that fall, from the
memory before the record on; peaks are held against the recorded one. Addresses below 2**40 are those of
CUDA's own ranges, which the record from Windows has, and expandable segments; higher ones are those of a
process on Linux.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from itertools import pairwise
from pathlib import Path

from benchmarks.rows import write_rows
from planner.allocator import CachingAllocator, MemoryLimits, config_of_torch, parse_alloc_conf
from planner.allocator.history import History, check_history, load_published
from planner.allocator.history.file import load_history

COUNTS = Path(__file__).with_name("addresses.csv")
OWN_RANGE_BELOW = 2**40
_MIDDLE = 2**50  # of the addresses of a record that begins with no memory
_GRANTS = ("segment_alloc", "segment_map")
_RELEASES = ("segment_free", "segment_unmap")


@dataclass(frozen=True, slots=True)
class Placement:
    """Directions of the new segments of one record, and its reserved peaks with either order of addresses."""

    name: str
    addresses: str  # "process" or "own range"
    is_expandable: bool
    above: int  # new segments above the one before
    below: int
    start_bytes: int  # reserved before the record
    recorded_bytes: int  # peak reserved
    rising_bytes: int
    falling_bytes: int


def placements(folder: Path) -> Iterator[Placement]:
    """Yield the placement of each record in which memory was requested from CUDA."""
    for name, history in _histories(folder):
        places = _places(history)
        if not places:
            continue
        above, below = directions(history)
        check = check_history(history)
        capacity = None if check.refused_bytes is None else check.peak_reserved_bytes
        yield Placement(
            name,
            "own range" if max(places) < OWN_RANGE_BELOW else "process",
            any(event.action == "segment_map" for event in history.events),
            above,
            below,
            sum(state.size_bytes for state in history.start),
            check.peak_reserved_bytes,
            reserved_with(history, capacity, falls=False),
            reserved_with(history, capacity, falls=True),
        )


def _histories(folder: Path) -> Iterator[tuple[str, History]]:
    """Yield the histories of a folder with their names: those that others published, and those of probes."""
    for path in sorted(folder.glob("*.json.gz")):
        published = load_published(path)
        yield published.name, published.history
    for path in sorted(folder.glob("*.history.gz")):
        yield path.name.removesuffix(".history.gz"), load_history(path)


def directions(history: History) -> tuple[int, int]:
    """Return how many new segments of a record lie above and below the segment before."""
    pairs = [*pairwise(_places(history))]
    return sum(one < other for one, other in pairs), sum(one > other for one, other in pairs)


def _places(history: History) -> list[int]:
    return [event.address for event in history.events if event.action in _GRANTS]


def reserved_with(history: History, capacity_bytes: int | None, *, falls: bool) -> int:
    """Return the peak reserved with addresses of one order; the cache is emptied as recorded."""
    config = parse_alloc_conf(history.alloc_conf, config_of_torch(history.torch))
    allocator = CachingAllocator(
        MemoryLimits(capacity_bytes, None, None, config), _addresses(history, falls=falls)
    )
    blocks = allocator.hold(history.start)
    released = False
    for event in history.events:
        if event.action in _RELEASES:
            released = True
        elif event.action == "alloc":
            if released and capacity_bytes is None:  # nothing was refused
                allocator.empty_cache()
            released = False
            block = allocator.malloc(event.size_bytes, event.stream)
            if block is not None:
                blocks[event.address] = block
        elif event.action == "free_completed" and event.address in blocks:
            allocator.free(blocks.pop(event.address))
    return allocator.peak_reserved_bytes


def _addresses(history: History, *, falls: bool) -> Callable[[int], int]:
    ends = [(state.address, state.address + state.size_bytes) for state in history.start]
    low, high = (min(ends)[0], max(end for _, end in ends)) if ends else (_MIDDLE, _MIDDLE)

    def fall(size_bytes: int) -> int:
        nonlocal low
        low -= size_bytes
        return low

    def rise(size_bytes: int) -> int:
        nonlocal high
        high += size_bytes
        return high - size_bytes

    return fall if falls else rise


def main() -> None:
    """Print a line for each record."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--counts", type=Path, metavar="FILE", help=f"write a table such as {COUNTS.name}")
    options = parser.parse_args()
    rows = []
    for row in placements(options.folder):
        rows.append(row)
        print(*astuple(row), sep="\t", flush=True)
    if options.counts:
        write_rows(options.counts, Placement, rows)


if __name__ == "__main__":
    main()
