"""Compare compiled plans with what torch.compile itself takes, in seconds of the processor.

    python -m benchmarks.speed.compiled --python PYTHON [--jobs 1-4]

PYTHON has the CUDA build of torch, Triton and the models' libraries. Jobs are those of
`benchmarks.emulated.capabilities.compiled`. Each is planned by `planner estimate` without a cache, and beside
it three steps of it run on an emulated GPU under torch.compile, whose caches are empty and which compiles in
its own process. Both figures are of whole processes with imports, user and system time with all children, so
that other work on the machine changes them less than wall time. A job is a row of `compiled.csv` beside this
file; those that have one are left out. Prints the rows as a Markdown table.
"""

import argparse
import resource
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.emulated.both_sides import Emulator
from benchmarks.emulated.capabilities.registry import load_capability
from benchmarks.emulated.differential import numbers_of
from benchmarks.emulated.jobs import DrawnJob
from benchmarks.emulated.probe_client import ROOT
from benchmarks.emulated.rows import add_row
from benchmarks.rows import read_rows
from planner.api.request.request import make_job

ROWS = Path(__file__).with_name("compiled.csv")
HEAD = (
    "| model, batch | options | torch.compile, s | plan, s | plan by torch.compile |\n|---|---|--:|--:|--:|"
)


@dataclass(frozen=True, slots=True)
class CompiledRow:
    """A job's seconds of the processor."""

    number: int
    model: str
    batch: int
    gpu: str
    options: str
    torch_compile_seconds: float
    plan_seconds: float


def main() -> None:
    """Time the jobs without a row, and print all rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", required=True)
    parser.add_argument("--jobs", metavar="FIRST-LAST", help="numbers of jobs; by default all")
    options = parser.parse_args()
    wanted = None if options.jobs is None else set(numbers_of(options.jobs))
    done = {row.number for row in read_rows(ROWS, CompiledRow)}
    for case in load_capability("compiled").cases:
        number = case.job.number
        if not case.command and number not in done and (wanted is None or number in wanted):
            running, planning = torch_seconds(case.job, options.python), plan_seconds(case.job)
            named = (case.job.model, case.job.batch, case.job.gpu, case.job.words)
            add_row(ROWS, CompiledRow(number, *named, round(running, 1), round(planning, 1)))
    print("\n".join([HEAD, *table_lines()]))


def plan_seconds(drawn: DrawnJob) -> float:
    """Return the seconds of a plan."""
    command = [
        sys.executable,
        "-m",
        "planner",
        "estimate",
        "--model",
        drawn.model,
        "--batch",
        str(drawn.batch),
    ]
    command += ["--gpu", drawn.gpu, "--no-cache", *shlex.split(drawn.words)]
    return _seconds(lambda: subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL))


def torch_seconds(drawn: DrawnJob, python: str) -> float:
    """Return the seconds of three compiled steps on an emulated GPU. Raises SystemExit where they fail."""
    job, _, _ = make_job(drawn.model, drawn.options)  # type: ignore[arg-type]

    def run() -> None:
        with TemporaryDirectory() as folder:
            emulator = Emulator(python, Path(folder))
            try:
                side, _ = emulator.run(job, drawn.batch, drawn.gpu)
            finally:
                emulator.close()
        if side.failure:
            raise SystemExit(f"{drawn.model}: {side.failure}")

    return _seconds(run)


def table_lines() -> Iterator[str]:
    """Yield the lines of the table below its head."""
    for row in read_rows(ROWS, CompiledRow):
        running, planning = row.torch_compile_seconds, row.plan_seconds
        options = row.options.replace("--compile default", "").strip()
        yield (
            f"| {row.model}, {row.batch} | {f'`{options}`' if options else ''} "
            f"| {running:.0f} | {planning:.0f} | {planning / running:.2f} |"
        )


def _seconds(call: Callable[[], object]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    call()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
