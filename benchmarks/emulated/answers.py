"""Compare what replays need by stored answers with what they need by the library whose answers these are.

    python -m benchmarks.emulated.answers --cudnn FOLDER [--jobs 0-79] [--to FILE.csv]

The jobs are the CNNs of `differential.py --cnns`; those with odd numbers are trained on images of another
size than their own, whose convolutions are not among the stored ones. A need is the least memory in which a
replay does not fail, to a MiB; a peak is what it reserves where nothing limits it. Both are computed;
docs/exactness.md has the library's beside emulated runs.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.emulated.differential import SEED, numbers_of
from benchmarks.emulated.jobs import DrawnJob, draw_cnn
from benchmarks.emulated.rows import AnyNumbered, add_missing_rows
from planner.allocator.config import MemoryLimits, config_of_torch
from planner.allocator.replay import replay_trace
from planner.api.request.request import make_job
from planner.hardware.database import find_device
from planner.hardware.device import MIB
from planner.jobs import STORED
from planner.planning.programs import open_programs
from planner.program import ignore_progress
from planner.program.bounds import live_bytes_bound
from planner.program.events import Outcome, Trace

ANSWERS = Path(__file__).with_name("answers.csv")
OTHER_SIZE = "3x192x192"


@dataclass(frozen=True, slots=True)
class AnswersRow:
    """One job by both sources, in MiB."""

    number: int
    model: str
    batch: int
    gpu: str
    options: str
    convolutions: str  # the source of the stored answers: of the very convolutions, or some of similar ones
    library_mib: int  # needs
    stored_mib: int
    library_peak_mib: int
    stored_peak_mib: int


def needed_mib(trace: Trace, batch: int, torch: str, peak_mib: int) -> int:
    """Return the least memory in which the replay does not fail, at most its peak where nothing limits it."""
    config = config_of_torch(torch)
    low, high = int(live_bytes_bound(trace.events)(batch)) // MIB, peak_mib
    while high - low > 1:
        middle = (low + high) // 2
        limits = MemoryLimits(capacity_bytes=middle * MIB, config=config)
        fails = replay_trace(trace, limits).outcome is Outcome.DOES_NOT_FIT
        low, high = (middle, high) if fails else (low, middle)
    return high


def peak_mib(trace: Trace, torch: str) -> int:
    """Return what the replay reserves where nothing limits it."""
    return replay_trace(trace, MemoryLimits(config=config_of_torch(torch))).peak_reserved_bytes // MIB


def compare_job(drawn: DrawnJob, cudnn: str) -> AnswersRow:
    """Plan one job by both sources."""
    options = {**drawn.options, **({"input": OTHER_SIZE} if drawn.number % 2 else {})}
    target, needs, peaks, source = find_device(drawn.gpu).target, [], [], ""
    for answers in (cudnn, STORED):
        job, _, _ = make_job(drawn.model, {**options, "cudnn": answers})  # type: ignore[typeddict-item]
        trace = open_programs(job, ignore_progress).trace(drawn.batch, target)
        peaks.append(peak_mib(trace, job.environment.torch))
        needs.append(needed_mib(trace, drawn.batch, job.environment.torch, peaks[-1]))
        source = trace.conv_account.source.value
    words = DrawnJob(drawn.number, drawn.model, drawn.batch, drawn.gpu, options).words
    row = drawn.number, drawn.model, drawn.batch, drawn.gpu, words, source
    return AnswersRow(*row, *needs, *peaks)


def add_rows(
    about: str | None,
    path: Path,
    kind: type[AnyNumbered],
    jobs: str,
    compare: Callable[[int, str], AnyNumbered],
) -> None:
    """Compare the jobs without a row, by the library that the command line names; `jobs` are the default."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=about, formatter_class=layout)
    parser.add_argument("--cudnn", required=True, help="the folder of the library")
    parser.add_argument("--jobs", default=jobs, metavar="FIRST-LAST", help="numbers of jobs")
    parser.add_argument("--to", type=Path, default=path, metavar="FILE")
    options = parser.parse_args()
    numbers = numbers_of(options.jobs)
    add_missing_rows(options.to, kind, numbers, lambda number: compare(number, options.cudnn))


if __name__ == "__main__":
    draw = partial(draw_cnn, SEED)
    add_rows(__doc__, ANSWERS, AnswersRow, "0-79", lambda number, cudnn: compare_job(draw(number), cudnn))
