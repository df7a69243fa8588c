"""Run jobs drawn at random on emulated GPUs and by the static planner, and find their first difference.

    python -m benchmarks.emulated.differential --python PYTHON [--jobs 0-199] [--part 1/2] [--to FILE.csv]

PYTHON has the CUDA build of torch, the libraries of the models and the planner's dependencies, both in
the versions of this environment, so that both sides run the same Python code. The static side plans for the
version of PYTHON's torch. Each finished job is a row of the file; numbers that have one are left out, unless
--again CAUSE names the beginning of theirs. Processes with another --part may run at the same time. --cnns
draws convolutional classifiers in float32, and --cudnn names what answers for the static side's convolutions,
such as "stored", in place of the cuDNN of PYTHON.
`exactness.py` writes the table of causes.
"""

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from benchmarks.emulated.both_sides import Emulator, Side, cudnn_of, plan_statically, torch_of
from benchmarks.emulated.jobs import FIXED, DrawnJob, draw_cnn, draw_job
from benchmarks.emulated.parting import find_parting
from benchmarks.emulated.rows import ALLOCATOR, EMULATED_FAILS, IDENTICAL, STATIC_FAILS, Row, add_row
from benchmarks.emulated.version_jobs import VERSION_JOBS
from benchmarks.rows import read_rows
from planner.allocator.history.check import check_history
from planner.allocator.history.file import load_history
from planner.allocator.history.lifetimes import Recording, recording_of
from planner.api.request.request import make_job
from planner.errors import PlannerError
from planner.hardware.database import find_device
from planner.program.events import Trace

SEED = 14
HERE = Path(__file__).parent


def compare_job(drawn: DrawnJob, emulator: Emulator, libraries: Mapping[str, str]) -> Row:
    """Run one job both ways; `libraries` are options of the static side."""
    start = perf_counter()
    device = find_device(drawn.gpu)
    try:
        job, _, _ = make_job(drawn.model, {**drawn.options, **libraries})  # type: ignore[typeddict-item]
    except PlannerError as error:
        return row_of(drawn, Side(), Side(failure=f"{type(error).__name__}: {error}"), STATIC_FAILS, start)
    emulated, history = emulator.run(job, drawn.batch, drawn.gpu)
    planned, trace = plan_statically(job, drawn.batch, device)
    if emulated.failure:
        return row_of(drawn, emulated, planned, EMULATED_FAILS, start)
    if trace is None:
        return row_of(drawn, emulated, planned, STATIC_FAILS, start)
    return _compare(drawn, emulated, planned, trace, history, start)


def _compare(
    drawn: DrawnJob, emulated: Side, planned: Side, trace: Trace, history: Path, start: float
) -> Row:
    if not history.exists():
        return row_of(drawn, emulated, planned, "no history", start)
    recorded = load_history(history)
    allocator = check_history(recorded).difference or ""
    return with_causes(drawn, emulated, planned, trace, recording_of(recorded, "emulated"), allocator, start)


def with_causes(
    drawn: DrawnJob,
    emulated: Side,
    planned: Side,
    trace: Trace,
    recording: Recording,
    allocator: str,
    start: float,
) -> Row:
    """Return the row of two sides with the first difference between their events."""
    parting = find_parting(trace, recording)
    if parting is not None:
        causes = "; ".join(f"{cause} ({count})" for cause, count in parting.causes.items())
        row = row_of(
            drawn, emulated, planned, parting.cause, start, parting.place, parting.what, causes, allocator
        )
        return replace(row, convolutions=trace.conv_account.source.value)
    return by_peaks(drawn, emulated, planned, trace, allocator, start)


def by_peaks(
    drawn: DrawnJob, emulated: Side, planned: Side, trace: Trace, allocator: str, start: float
) -> Row:
    """Return the row of two sides without a difference between their events."""
    same = (emulated.allocated_bytes, emulated.reserved_bytes, emulated.oom) == (
        planned.allocated_bytes,
        planned.reserved_bytes,
        planned.oom,
    )
    cause = IDENTICAL if same else ALLOCATOR
    row = row_of(drawn, emulated, planned, cause, start, allocator=allocator)
    return replace(row, convolutions=trace.conv_account.source.value)


def row_of(
    drawn: DrawnJob,
    emulated: Side,
    planned: Side,
    cause: str,
    start: float,
    place: str = "",
    what: str = "",
    causes: str = "",
    allocator: str = "",
) -> Row:
    """Return the row of two sides."""
    return Row(
        drawn.number,
        drawn.model,
        drawn.batch,
        drawn.gpu,
        drawn.words,
        emulated.versions,
        emulated.allocated_bytes,
        emulated.reserved_bytes,
        emulated.oom,
        emulated.retries,
        planned.allocated_bytes,
        planned.reserved_bytes,
        planned.oom,
        planned.retries,
        cause,
        place,
        what,
        causes,
        allocator,
        emulated.failure or planned.failure,
        round(perf_counter() - start, 1),
    )


def numbers_of(text: str) -> Iterable[int]:
    """Yield the numbers of a text such as "0-9,12"."""
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def main() -> None:
    """Run the jobs without a row."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--python", required=True, help="a Python with the CUDA build of torch")
    parser.add_argument("--fixed", action="store_true", help="run the fixed jobs of jobs.py instead")
    parser.add_argument("--versions", action="store_true", help="run the jobs of version_jobs.py instead")
    parser.add_argument("--cnns", action="store_true", help="run CNNs in float32 instead")
    parser.add_argument("--cudnn", help="--cudnn of the static side")
    parser.add_argument("--jobs", default="0-199", metavar="FIRST-LAST", help="numbers of jobs")
    parser.add_argument(
        "--part", default="1/1", metavar="K/N", help="of the numbers, each N-th from the K-th"
    )
    parser.add_argument("--again", metavar="CAUSE", help="also run the jobs of this cause, by its beginning")
    parser.add_argument("--to", type=Path, default=HERE / "differential.csv", metavar="FILE")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="keep emulated histories, which --again then reuses"
    )
    options = parser.parse_args()
    with TemporaryDirectory(prefix="differential-") as temporary:
        emulator = Emulator(options.python, options.keep or Path(temporary))
        try:
            _run(options, emulator)
        finally:
            emulator.close()


def _run(options: argparse.Namespace, emulator: Emulator) -> None:
    part, parts = map(int, options.part.split("/"))
    libraries = {
        "cudnn": options.cudnn or cudnn_of(options.python),
        "torch": torch_of(options.python),
    }
    jobs = sorted(_jobs(options), key=lambda job: job.gpu)
    for drawn in jobs[part - 1 :: parts]:
        earlier = {row.number: row for row in read_rows(options.to, Row)}.get(drawn.number)
        if earlier is not None and (options.again is None or not earlier.cause.startswith(options.again)):
            continue
        row = compare_job(drawn, emulator, libraries)
        add_row(options.to, row)
        print(f"{row.number} {row.model} {row.batch} {row.gpu}: {row.cause} {row.failure[:150]}", flush=True)


def _jobs(options: argparse.Namespace) -> Sequence[DrawnJob]:
    if options.fixed:
        return FIXED
    if options.versions:
        return [job for job in VERSION_JOBS if job.number in set(numbers_of(options.jobs))]
    draw = draw_cnn if options.cnns else draw_job
    return [draw(SEED, number) for number in numbers_of(options.jobs)]


if __name__ == "__main__":
    sys.exit(main())
