"""The part of docs/accuracy.md on histories of real GPUs, from histories.csv."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from benchmarks.accuracy.histories import OTHER_ORDER, Counts, read_counts
from planner.program import TorchVersion

Table = Callable[[str, Iterable[str], int], Iterator[str]]

HEAD = """\

## Measured: the allocator, event by event

People publish what the allocator of their GPU recorded (`torch.cuda.memory._dump_snapshot`). {count} such
histories, collected from public repositories of others, were seen while this was written; they are not part
of this repository. Each is replayed through the simulated allocator. The requests and the memory that was
reserved before the first of them come from the record, and so do CUDA's addresses and its refusals. Every
block must then lie at the recorded address, and every segment must come and go at the recorded event with
the recorded size (`python -m benchmarks.accuracy.histories FOLDER`; `tests/benchmarks/test_histories.py`).

{agreed} of {count} agree to the last of {events} events: {allocations} allocations, {frees} frees,
{segments} changes of segments, {retries} retries after a refusal of CUDA, {ooms} out-of-memory error,
{emptied} calls of `empty_cache`. Replayed with the order in which torch {other} reuses equal free blocks,
{control} agree, so that the check can tell. Which requests a job makes is another question, which the rest
of this page and [exactness.md](exactness.md) are about.
"""
FOOT = """\
A card is named by the repository, or inferred from cuBLAS's workspace and the memory that was reserved; the
others are named by nothing. Versions come from lock files and from line numbers in stacks. Some histories
are parts of others, or repeat their requests, so that they are not as many independent trials.
"""
COLUMNS = "allocations | frees | segments | retries | out of memory | agree"


def measured_lines(table: Table) -> Iterator[str]:
    """Yield the lines of the section; none if no table of counts is there."""
    rows = read_counts()
    if not rows:
        return
    yield HEAD.format(
        count=len(rows),
        agreed=sum(row.agrees for row in rows),
        events=f"{sum(row.events for row in rows):,}",
        allocations=f"{sum(row.allocations for row in rows):,}",
        frees=f"{sum(row.frees for row in rows):,}",
        segments=f"{sum(row.segment_events for row in rows):,}",
        retries=sum(row.retries for row in rows),
        ooms=sum(row.ooms for row in rows),
        emptied=sum(row.emptied for row in rows),
        other=OTHER_ORDER,
        control=sum(row.agrees_with_other_order for row in rows),
    )
    yield from table(f"card | torch | kind | histories | {COLUMNS}", _cells(rows), 3)
    yield FOOT


def _cells(rows: Sequence[Counts]) -> Iterator[str]:
    groups: dict[tuple[str, str, str], list[Counts]] = {}
    for row in rows:
        groups.setdefault((row.gpu, row.torch, row.kind), []).append(row)
    for (gpu, torch, kind), group in sorted(groups.items(), key=lambda item: _place(item[0])):
        sums = (
            sum(row.allocations for row in group),
            sum(row.frees for row in group),
            sum(row.segment_events for row in group),
            sum(row.retries for row in group),
            sum(row.ooms for row in group),
        )
        figures = " | ".join(f"{value:,}" for value in sums)
        yield f"{gpu} | {torch} | {kind} | {len(group)} | {figures} | {sum(row.agrees for row in group)}"


def _place(key: tuple[str, str, str]) -> tuple[bool, str, TorchVersion, str]:
    """Order named cards first, then versions as numbers."""
    gpu, torch, kind = key
    return (
        gpu.startswith("not named"),
        gpu,
        tuple(int(part) for part in torch.split(".") if part.isdigit()),
        kind,
    )
