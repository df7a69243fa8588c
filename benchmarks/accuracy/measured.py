"""The part of docs/accuracy.md on histories of real GPUs, from histories.csv."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple

from benchmarks.accuracy import addresses, event_traces, histories, recorded, recorded_emulated
from benchmarks.accuracy.histories import OTHER_ORDER, Counts
from benchmarks.rows import read_rows
from planner.hardware import MIB
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
ADDRESSES = """\
### Which addresses CUDA gives

Before torch 2.12 the lowest of equal free blocks is reused, so that CUDA's addresses can decide what is
reserved. The records have two answers. Where segments lie at addresses of the process, 47 bits long as on
Linux, a new one mostly lies below the one before. In the low range of CUDA's own, which a record from Windows
has, and expandable segments everywhere, a new one lies above, but for a few. Which platform the other records
with low addresses come from they do not tell, so this is no rule for all of Linux.

What it is worth: the requests of each record are replayed from the memory before it, once with addresses that
only fall and once with addresses that only rise (`python -m benchmarks.accuracy.addresses FOLDER`).
"""
ADDRESSES_FOOT = """\
The peak reserved is within 0.5 % of the recorded one in {falling} of {count} records with falling addresses,
which the product has, and in {rising} with rising ones. A peak that was reached before the record began is
the recorded one in any order; that is so in {before} of them.
"""
CARDS = """\
### What the records say about cards
"""
CARD_ROWS = (
    "cuBLAS's workspace, RTX 4060 Ti and others below capability 9.0 (torch 2.3 to 2.6) "
    "| 8,519,680 bytes | the same",
    "cuBLAS's workspace, H100 and another of capability 9.0 (torch 2.1 to 2.6) | 33,554,432 bytes | the same",
    "total of an A100-SXM4-80GB as torch sees it (torch 2.8) | 81,033 to 81,051 MiB | 81,153 MiB, spread 50",
    "outside of the allocator of one of three A100s of a process that ran out of memory "
    "| 657 MiB | 471 MiB, spread 54",
    "what a process could have of a card of 24 GB | 23,280 to 24,024 MiB | ",
)
CARDS_FOOT = """\
The total is 8/9 of the distance between expandable segments. The last row is the highest level that was
reached and the lowest that CUDA refused, of several processes. No figure of `planner/hardware` was changed:
the first two agree, other drivers are known to leave an A100 81,038 to 81,111 MiB, the 657 MiB are those of a
process of three GPUs, and nothing names the card of 24 GB.
"""
JOBS = """\

## Measured: whole jobs, planned and emulated beside the record

{count} of these records are of jobs whose facts are complete enough to write the jobs anew, in
`benchmarks/accuracy/recorded_jobs`: operators, sizes, order, and which names live on, as the records tell,
which were seen meanwhile. Each job is planned without a GPU for the version of torch that ran
(`python -m benchmarks.accuracy.recorded FOLDER`), and run on an emulated GPU with that version itself, torch
{versions} (`python -m benchmarks.accuracy.recorded_emulated FOLDER PYTHON...`). Both are held
against the record, allocation by allocation; the record alone is of a real GPU. A record that begins with
the first tensor is compared as a whole; one that begins later is compared with the last steps. Before them
plan and emulated run do what the process did: five steps, a pass, or the passes of the models before. Several
records are of one job with other sizes, so that there are fewer kinds of jobs than rows. If a record names no
card, plan and run are for an RTX 4090. The last two rows are of torch 2.3 and 2.2, whose rules the planner
does not have and whose cuDNN does not answer for a GPU that is only described: they are planned as of torch
2.4, on an RTX 4090 and an A100, and not emulated.

{identical} of {count} plans have the recorded allocations, {allocations} of them, in the same order and of
the same size, each freed at the recorded place. {emulated} of {runs} emulated runs have them too, each of the
bytes requested, and {starts} of the {later} that are of a later step begin it with the recorded bytes in use.
Of the other plan, {others}, all allocations but
{workspaces} workspaces of convolutions are the recorded ones, in the same order: cuDNN 8 took 134,217,728
bytes for each pointwise convolution and the gradient of its input, and that and the weights' bytes for the
gradient of the weights, where the planner's term for torch 2.4 has nothing. The record names no card, so this
is no rule of the planner, whose allocated peak is 24.9 % lower.
"""
JOBS_FOOT = """\
Of the {count} plans that agree, {allocated} peaks allocated and {reserved} reserved are the recorded ones
to the byte, of the emulated runs {emulated_allocated} and {emulated_reserved}; all are within {worst} %. As
the requests are the same, what is left is where blocks lie: a free block that is at most 1 MiB too large is
taken whole, and counts as allocated. Which one is taken follows from CUDA's addresses. Plans have falling
addresses; emulated runs have those of most new segments of the record, which rise in {rising} records. With
falling ones each emulated run has both peaks of the plan. Two peaks of training steps of 405 million
parameters differ with either order: those records have no segment events of the steps before, in which the
memory was reserved.
So do those of the step of 2.7 billion parameters at length 256: the peak reserved of its record was reached
before the cache was emptied, as the step began; after that it is 58,198.0 MiB, 0.1 % below the plan.

Writing them down has shown five faults of the planner, which are mended: the first step's tensors could live
for ever, since importing torch's compiler within an operator kept the frames of all callers; of an optimizer
that makes its state at once the last tensor was kept; in inference mode composite operators were taken for
one kernel each; before torch 2.9 the product of `einsum` is transposed if the weights come first, where the
plan had a contiguous one, and reductions over it take scratch memory (164,626,432 bytes for a maximum); and
indices that are on the CPU were not moved to the GPU. Running them has shown what the jobs had wrong in
blocks that are older than the record: the size of the tables of rotary embeddings, other batches beside the
first one, and a loss that lives on.

What is missing: records of compiled jobs come from inductor of torch 2.6 and 2.10, with breaks between small
graphs, and are held against no plan, since the planner compiles with the installed torch's alone.

## Measured: steps in profilers' traces

Profilers record the sizes of blocks in order, without addresses. {traces} such steps are held against plans
(`python -m benchmarks.accuracy.event_traces FOLDER`): each tensor that is planned must be in the record, in
the planned order, and what lies between two of them is held against the workspaces planned there, which are
stored answers of cuDNN 9. The torch of the V100's record, 1.9, makes another tensor in each batch norm (54 of
the other blocks), and chose its algorithms by time.
"""
COLUMNS = "allocations | frees | segments | retries | out of memory | agree"


def measured_lines(table: Table) -> Iterator[str]:
    """Yield the lines of the section; none if no table of counts is there."""
    rows = read_rows(histories.COUNTS, Counts)
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
    yield from _address_lines(table)
    yield CARDS
    yield from table("what | recorded | in the planner", CARD_ROWS, 3)
    yield CARDS_FOOT
    yield from _job_lines(table)


def _job_lines(table: Table) -> Iterator[str]:
    rows = read_rows(recorded.COUNTS, recorded.Comparison)
    runs = {row.record: row for row in read_rows(recorded_emulated.COUNTS, recorded_emulated.Comparison)}
    later = [run for run in runs.values() if run.recorded_start_bytes]
    yield JOBS.format(
        count=len(rows),
        identical=sum(row.is_identical for row in rows),
        allocations=f"{sum(row.matched for row in rows if row.is_identical):,}",
        runs=len(runs),
        emulated=sum(run.is_identical for run in runs.values()),
        later=len(later),
        starts=sum(run.emulated_start_bytes == run.recorded_start_bytes for run in later),
        versions=", ".join(sorted({run.torch for run in runs.values()}, key=_number)),
        others=", ".join(row.record for row in rows if not row.is_identical),
        workspaces=sum(row.conv_workspaces for row in rows),
    )
    yield from table(
        "record | card | torch | allocations | planned alike | emulated alike | "
        "peak allocated: planned, emulated, recorded (MiB) | reserved",
        (_job_cells(row, runs.get(row.record)) for row in rows),
        3,
    )
    alike = [row for row in rows if row.is_identical]
    traces = read_rows(event_traces.COUNTS, event_traces.Comparison)
    peaks = _peaks_alike(alike, list(runs.values()))
    yield JOBS_FOOT.format(count=len(alike), traces=len(traces), **peaks)
    yield from table(
        "trace | planned for | torch of the record | tensors planned | found | workspaces planned | "
        "other blocks recorded | of a planned workspace's size",
        (" | ".join(str(value) for value in astuple(row)) for row in traces),
        3,
    )


def _job_cells(row: recorded.Comparison, run: recorded_emulated.Comparison | None) -> str:
    allocated = f"{_mib(row.planned_allocated_bytes)}, {{}}, {_mib(row.recorded_allocated_bytes)}"
    reserved = f"{_mib(row.planned_reserved_bytes)}, {{}}, {_mib(row.recorded_reserved_bytes)}"
    figures = (
        ("not run", "-", "-")
        if run is None
        else (
            f"{run.matched:,}",
            _mib(run.emulated_allocated_bytes),
            _mib(run.emulated_reserved_bytes),
        )
    )
    return (
        f"{row.record} | {row.card} | {row.torch} | {row.recorded:,} | {row.matched:,} | {figures[0]} | "
        f"{allocated.format(figures[1])} | {reserved.format(figures[2])}"
    )


def _peaks_alike(
    rows: Sequence[recorded.Comparison], runs: Sequence[recorded_emulated.Comparison]
) -> dict[str, object]:
    """Return how many peaks are the recorded ones, and the largest difference."""
    pairs = {
        "allocated": [(row.planned_allocated_bytes, row.recorded_allocated_bytes) for row in rows],
        "reserved": [(row.planned_reserved_bytes, row.recorded_reserved_bytes) for row in rows],
        "emulated_allocated": [(run.emulated_allocated_bytes, run.recorded_allocated_bytes) for run in runs],
        "emulated_reserved": [(run.emulated_reserved_bytes, run.recorded_reserved_bytes) for run in runs],
    }
    worst = max(abs(ours / theirs - 1) for column in pairs.values() for ours, theirs in column)
    rising = sum(run.addresses == "rising" for run in runs)
    counts: dict[str, object] = {
        name: sum(ours == theirs for ours, theirs in column) for name, column in pairs.items()
    }
    return {**counts, "rising": rising, "worst": f"{100 * worst:.2f}"}


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:,.1f}"


def _address_lines(table: Table) -> Iterator[str]:
    rows = read_rows(addresses.COUNTS, addresses.Placement)
    yield ADDRESSES
    cells = []
    for key in sorted({(row.addresses, row.is_expandable) for row in rows}, reverse=True):
        group = [row for row in rows if (row.addresses, row.is_expandable) == key]
        name = {"process": "of the process", "own range": "CUDA's own, low"}[key[0]]
        sums = sum(row.above for row in group), sum(row.below for row in group)
        equal = (
            sum(row.falling_bytes == row.recorded_bytes for row in group),
            sum(row.rising_bytes == row.recorded_bytes for row in group),
        )
        figures = " | ".join(f"{value:,}" for value in (len(group), *sums, *equal))
        cells.append(f"{name}{', expandable' * key[1]} | {figures}")
    yield from table(
        "addresses | records | new segments above | below | peak reserved equal, falling | rising", cells, 1
    )
    yield ADDRESSES_FOOT.format(
        count=len(rows),
        falling=sum(_is_near(row.falling_bytes, row.recorded_bytes) for row in rows),
        rising=sum(_is_near(row.rising_bytes, row.recorded_bytes) for row in rows),
        before=sum(row.start_bytes == row.recorded_bytes for row in rows),
    )


def _is_near(size_bytes: int, recorded_bytes: int) -> bool:
    return abs(size_bytes - recorded_bytes) <= 0.005 * recorded_bytes


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


def _number(version: str) -> TorchVersion:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def _place(key: tuple[str, str, str]) -> tuple[bool, str, TorchVersion, str]:
    """Order named cards first, then versions as numbers."""
    gpu, torch, kind = key
    return (
        gpu.startswith("not named"),
        gpu,
        _number(torch),
        kind,
    )
