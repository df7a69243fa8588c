"""Jobs whose record a real GPU left, run on an emulated GPU and held against it, event by event.

    python -m benchmarks.accuracy.recorded_emulated FOLDER PYTHON...            # a line for each job
    python -m benchmarks.accuracy.recorded_emulated FOLDER PYTHON... --counts   # and renew its table

FOLDER holds the records (benchmarks/accuracy/histories.py). Each PYTHON has a CUDA build of torch with cuDNN
9.8 or newer, and runs the jobs whose record is of its version. Jobs are those of `recorded.py`; what torch's
own recorder dumps of the emulated process is compared with the record as a plan is. New segments lie
above or below the one before, as most of the record's do. `--counts` writes
recorded_emulated.csv, whose rows of versions that did not run are kept.
"""

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from itertools import groupby, zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from msgspec.structs import replace

from benchmarks.accuracy.addresses import directions
from benchmarks.accuracy.histories import card_of
from benchmarks.accuracy.recorded import JOBS, JOBS_FOLDER, RecordedJob
from benchmarks.emulated.both_sides import torch_of
from benchmarks.emulated.emulate import emulate
from benchmarks.rows import read_rows, write_rows
from planner.allocator.history import (
    History,
    Recording,
    check_history,
    compare_with_recording,
    load_published,
    load_snapshot,
    recording_of,
)
from planner.allocator.history.lifetimes import Allocation, allocations_of
from planner.jobs import parse_tensor_spec
from planner.program import Trace

COUNTS = Path(__file__).with_name("recorded_emulated.csv")
_OF_ONE_PROCESS = "large_transformer.py:Passes"


@dataclass(frozen=True, slots=True)
class Comparison:
    """A job's emulated run beside the record."""

    record: str
    card: str  # as the record names it
    gpu: str  # emulated
    torch: str  # that ran
    emulated: int  # allocations
    recorded: int
    matched: int  # of the same size in the same order
    other_lifetimes: int  # of these, blocks that are freed elsewhere in the order
    emulated_allocated_bytes: int  # peak
    recorded_allocated_bytes: int
    emulated_reserved_bytes: int
    recorded_reserved_bytes: int
    emulated_start_bytes: int  # in use as the first allocation is made
    recorded_start_bytes: int
    first_difference: str  # of requested bytes or lifetimes, or from the simulator; empty if there is none
    addresses: str  # rising or falling, of new segments, as most of the record's

    @property
    def is_identical(self) -> bool:
        """Return whether each allocation requests the recorded bytes and is freed at the recorded place."""
        return not self.first_difference


def run_jobs(jobs: Iterable[RecordedJob], folder: Path, python: str) -> Iterator[Comparison]:
    """Run jobs on emulated GPUs with a Python and yield their comparisons with their records."""
    torch = torch_of(python)
    for gpu, of_gpu in groupby(sorted(jobs, key=lambda job: job.gpu), key=lambda job: job.gpu):
        group = list(of_gpu)
        records = {job.record: load_published(folder / f"{job.record}.json.gz").history for job in group}
        with TemporaryDirectory(prefix="recorded-") as temporary:
            snapshots = {job.record: Path(temporary) / f"{job.record}.pickle" for job in group}
            processes: dict[tuple[Any, ...], dict[str, Any]] = {}
            for job in group:
                record = records[job.record]
                new = {"addresses": order_of(record), "jobs": []}
                process = processes.setdefault(_process_of(job), new)
                process["jobs"].append(_case_of(job, record, snapshots[job.record]))
            emulate(python, gpu, "recorded_loop.py", [*processes.values()])
            for job in group:
                emulated = replace(load_snapshot(snapshots[job.record]), torch=torch)
                yield compare(job, torch, emulated, records[job.record])


def _process_of(job: RecordedJob) -> tuple[Any, ...]:
    """Return what is the same in the jobs of one process.

    The passes of the large model were recorded in one process for each precision, by rising length.
    """
    return (job.model, job.arguments["in_bfloat16"]) if job.model == _OF_ONE_PROCESS else (job.record,)


def _case_of(job: RecordedJob, record: History, snapshot: Path) -> dict[str, Any]:
    file, _, name = job.model.partition(":")
    steps = 1 if job.model == _OF_ONE_PROCESS else job.steps  # other jobs are what was before
    specs = [parse_tensor_spec(text) for text in job.inputs]
    return {
        "file": str((JOBS_FOLDER / file).resolve()),
        "name": name,
        "arguments": job.arguments,
        "inputs": [([job.batch, *spec.shape], spec.dtype) for spec in specs],
        "steps": steps,
        "starts_with_step": steps if record.start else 0,
        "snapshot": str(snapshot),
    }


def compare(job: RecordedJob, torch: str, emulated: History, record: History) -> Comparison:
    """Hold the history of an emulated run against the record of its job."""
    ours, check = check_history(emulated), check_history(record)
    run = recording_of(emulated, "emulated")
    recording = recording_of(record, job.record)
    difference = compare_with_recording(Trace(run.events, run.sites, job.batch), recording)
    return Comparison(
        job.record,
        card_of(record.gpu),
        job.gpu,
        torch,
        difference.traced_allocations,
        difference.recorded_allocations,
        difference.matched,
        len(difference.lives),
        ours.peak_allocated_bytes,
        check.peak_allocated_bytes,
        ours.peak_reserved_bytes,
        check.peak_reserved_bytes,
        _first_level(emulated),
        _first_level(record),
        find_first_difference(run, recording) or ours.difference or "",
        order_of(record),
    )


def order_of(record: History) -> str:
    """Return the direction in which CUDA placed most new segments of a record, or falling if it has none."""
    above, below = directions(record)
    return "rising" if above > below else "falling"


def find_first_difference(emulated: Recording, recorded: Recording) -> str:
    """Return in words the first allocation of other requested bytes or lifetime, or "" if there is none."""
    sides = [allocations_of(one.events, one.sites, recorded.config) for one in (emulated, recorded)]
    for at, (ours, theirs) in enumerate(zip_longest(*sides)):
        if ours is None or theirs is None:
            return f"allocation {at}: {_size(ours)} emulated, {_size(theirs)} recorded"
        where = f"{theirs.site.module} {theirs.site.op}"
        if ours.requested_bytes != theirs.requested_bytes:
            return f"allocation {at}, {where}: {_size(ours)} emulated, {_size(theirs)} recorded"
        if ours.freed != theirs.freed:
            return f"allocation {at}, {where}: freed before {ours.freed} emulated, {theirs.freed} recorded"
    return ""


def _first_level(history: History) -> int:
    """Return the bytes in use as the first allocation of a history is made."""
    live = {block.address: block.size_bytes for one in history.start for block in one.blocks if block.in_use}
    for event in history.events:
        if event.action == "alloc":
            break
        if event.action == "free_completed":
            live.pop(event.address, None)
    return sum(live.values())


def _size(one: Allocation | None) -> str:
    return "none" if one is None else f"{one.requested_bytes:,} bytes"


def main() -> None:
    """Run the jobs of each Python's version of torch."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("pythons", nargs="+", metavar="PYTHON")
    parser.add_argument("--counts", action="store_true", help=f"renew {COUNTS.name}")
    options = parser.parse_args()
    rows = {row.record: row for row in read_rows(COUNTS, Comparison)}
    for python in options.pythons:
        version = torch_of(python)
        jobs = [job for job in JOBS if job.is_emulated and version.startswith(f"{job.torch}.")]
        for row in run_jobs(jobs, options.folder, python):
            rows[row.record] = row
            print(
                f"{row.record}: {row.matched} of {row.recorded} allocations,",
                row.first_difference or "identical",
                *astuple(row)[8:12],
                flush=True,
            )
    if options.counts:
        write_rows(COUNTS, Comparison, (rows[job.record] for job in JOBS if job.record in rows))


if __name__ == "__main__":
    main()
