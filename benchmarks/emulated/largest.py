"""Hold the largest batch sizes of jobs drawn at random against emulated runs at the answer and at the next.

    python -m benchmarks.emulated.largest --python PYTHON [--jobs 0-199] [--to FILE.csv]

PYTHON and the jobs are those of `differential.py`, with another seed. The planner queries the cuDNN that the
runs use. For each job it answers at confidence 0.5 and at 0.99.

What the allocator may take has to mean the same on both sides: on the emulated GPU it is usable memory less
the CUDA context, and nothing else lies outside of the allocator; handles and lazily loaded code take
nothing there. At confidence 0.5 the planner leaves beside the replay the medians of what real runs show:
usable memory, context, and for some kinds of jobs a share of the need (the location of residuals.json),
which an emulated run cannot have. The emulated GPU's context is all of that together, so that searches and
replays are judged, and not the medians; the rows have the share of the GPU that the kind takes beyond the
context. At 0.99 usable memory and context of the run are drawn from the planner's distributions, by the
job's number, and the kind's share is none: an emulated run needs what it needs.

Lives means that three steps end, with retries or without. Left out are jobs that fail for another reason
than memory, runs of more than MAX_SECONDS, and plans of more than PLAN_SECONDS. Each finished job is a row;
numbers that have one are skipped, unless --again names the beginning of their verdict. `exactness.py`
writes the table.
"""

import argparse
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from time import perf_counter

from msgspec.structs import replace

from benchmarks.emulated.both_sides import Emulator, Side, cudnn_of
from benchmarks.emulated.differential import numbers_of
from benchmarks.emulated.jobs import DrawnJob, draw_job
from benchmarks.emulated.parting import Parting, find_parting
from benchmarks.emulated.rows import add_row
from benchmarks.rows import read_rows
from planner.allocator.config import AllocatorConfig
from planner.allocator.history.file import load_history
from planner.allocator.history.lifetimes import recording_of
from planner.api.request.request import make_job
from planner.errors import PlannerError
from planner.hardware.budget import make_budget
from planner.hardware.database import find_device
from planner.hardware.device import Device, SourcedBytes
from planner.jobs import Job
from planner.planning.programs import CaptureMode, open_programs
from planner.planning.search.max_batch import Plan, find_max_batch
from planner.program import LARGEST_BATCH, ignore_progress

SEED = 16
MAX_SECONDS, PLAN_SECONDS = 60, 90
CONFIDENT = 0.99
HERE = Path(__file__).parent

RIGHT = "right"
DIES = "dies at the answer"
LIVES = "lives at the next"
DIES_CONFIDENT = "dies at 0.99"
LEFT_OUT = "left out"
NO_PARTING = "none: the events are the same"


@dataclass(frozen=True, slots=True)
class LargestRow:
    """The answers for one job, and the emulated runs beside them."""

    number: int
    model: str
    gpu: str
    options: str
    versions: str
    largest: int  # at confidence 0.5
    comfortable: int  # of these, the largest without retries
    at_largest: str  # lives, retries, dies; "" where there was no run
    at_next: str
    share: float  # of the room beside the context, which the kind of job leaves free at 0.5
    confident: int  # the largest at confidence 0.99
    confident_room: int  # drawn bytes of usable memory less context
    at_confident: str
    verdict: str
    cause: str  # of the first event that differs
    place: str
    what: str
    failure: str
    seconds: float


@dataclass(slots=True)
class _Job:
    """A job with its plans and its runs."""

    drawn: DrawnJob
    job: Job
    card: Device
    emulator: Emulator

    def run(self, batch: int, card: Device) -> tuple[str, Side, Path]:
        """Return lives, retries or dies of an emulated run, its figures and its history."""
        side, history = self.emulator.run(self.job, batch, self.drawn.gpu, card)
        if side.failure:
            raise _LeftOutError(f"emulated at batch {batch}: {side.failure}")
        return "dies" if side.oom else "retries" if side.retries else "lives", side, history

    def cause(self, batch: int, history: Path) -> Parting:
        """Return the first difference between the run and the planner's trace at this batch size."""
        programs = open_programs(self.job, ignore_progress, mode=CaptureMode.WITH_PROVENANCE)
        trace = programs.trace(batch, self.card.target)
        parting = find_parting(trace, recording_of(load_history(history), "emulated"))
        return parting or Parting(NO_PARTING, "", "", {})


class _LeftOutError(BaseException):  # which no handler on the way takes for the job's own
    """A job that says nothing about memory; the text is the reason."""


def judge_job(drawn: DrawnJob, emulator: Emulator, cudnn: str) -> LargestRow:
    """Plan one job, and run it at the answers."""
    start = perf_counter()
    card = find_device(drawn.gpu)
    try:
        job, _, _ = make_job(drawn.model, {**drawn.options, "cudnn": cudnn})  # type: ignore[typeddict-item]
        plans = _plan(job, card)
        return _run(_Job(drawn, job, card, emulator), *plans, start)
    except (PlannerError, _LeftOutError) as error:
        reason = " ".join(str(error).split())[:300]
        empty = ("", 0, 0, "", "", 0.0, 0, 0, "", LEFT_OUT, "", "", "", reason)
        return LargestRow(*_head(drawn), *empty, _since(start))  # type: ignore[arg-type]


def _plan(job: Job, card: Device) -> tuple[Plan, Plan]:
    """Return the plans at both confidences."""
    programs = open_programs(job, ignore_progress)
    with _time_limit():
        half, confident = (
            find_max_batch(job, make_budget(card, confidence, AllocatorConfig()), programs)
            for confidence in (0.5, CONFIDENT)
        )
    if not half.search.largest:
        raise _LeftOutError("not even batch 1 fits")
    if half.search.largest == LARGEST_BATCH:
        raise _LeftOutError(f"no larger batch than {LARGEST_BATCH:,} is planned")
    return half, confident


@contextmanager
def _time_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise _LeftOutError(f"the plan takes more than {PLAN_SECONDS} s")

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, PLAN_SECONDS, 1.0)  # again, where a destructor takes the first
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _run(of: _Job, half: Plan, confident: Plan, start: float) -> LargestRow:
    largest, sure = half.search.largest, confident.search.largest
    median_card, drawn_card = _median_card(of.card, half), _draw_card(of.drawn.number, of.card)
    at_largest, side, answer_history = of.run(largest, median_card)
    at_next, _, next_history = of.run(largest + 1, median_card)
    at_confident, sure_history = "", None
    if sure:
        at_confident, _, sure_history = of.run(sure, drawn_card)
    verdict, batch, history = RIGHT, 0, answer_history
    if at_confident == "dies" and sure_history is not None:
        verdict, batch, history = DIES_CONFIDENT, sure, sure_history
    elif at_largest == "dies":
        verdict, batch, history = DIES, largest, answer_history
    elif at_next != "dies":
        verdict, batch, history = LIVES, largest + 1, next_history
    parting = of.cause(batch, history) if batch else Parting("", "", "", {})
    return LargestRow(
        *_head(of.drawn),
        side.versions,
        largest,
        half.search.comfortable,
        at_largest,
        at_next,
        round((median_card.context.value - of.card.context.value) / of.card.usable.value, 5),
        sure,
        drawn_card.usable.value - drawn_card.context.value,
        at_confident,
        verdict,
        parting.cause,
        parting.place,
        parting.what,
        "",
        _since(start),
    )


def _median_card(card: Device, plan: Plan) -> Device:
    """Return the card whose context is all that the planner leaves beside the replay."""
    room = plan.budget.limits.capacity_bytes
    assert room is not None
    return replace(card, context=replace(card.context, value=card.usable.value - room))


def _draw_card(number: int, card: Device) -> Device:
    """Return the card with usable memory and context drawn from the planner's distributions."""
    random = Random(f"{SEED}/{number}/card")

    def drawn(figure: SourcedBytes) -> SourcedBytes:
        return replace(figure, value=max(0, round(random.gauss(figure.value, figure.spread))))

    return replace(card, usable=drawn(card.usable), context=drawn(card.context))


def _head(drawn: DrawnJob) -> tuple[int, str, str, str]:
    return drawn.number, drawn.model, drawn.gpu, drawn.words


def _since(start: float) -> float:
    return round(perf_counter() - start, 1)


def main() -> None:
    """Judge the jobs without a row."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--python", required=True, help="a Python with the CUDA build of torch")
    parser.add_argument("--jobs", default="0-199", metavar="FIRST-LAST", help="numbers of jobs")
    parser.add_argument("--again", metavar="VERDICT", help="also the jobs of this verdict, by its beginning")
    parser.add_argument("--to", type=Path, default=HERE / "largest.csv", metavar="FILE")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep emulated runs, to be used again")
    options = parser.parse_args()
    with TemporaryDirectory(prefix="largest-") as temporary:
        emulator = Emulator(options.python, options.keep or Path(temporary), MAX_SECONDS)
        try:
            _judge_all(options, emulator)
        finally:
            emulator.close()


def _judge_all(options: argparse.Namespace, emulator: Emulator) -> None:
    cudnn = cudnn_of(options.python)
    jobs = [draw_job(SEED, number) for number in numbers_of(options.jobs)]
    rows = {row.number: row for row in read_rows(options.to, LargestRow)}
    for drawn in jobs:
        earlier = rows.get(drawn.number)
        if earlier is not None and (options.again is None or not earlier.verdict.startswith(options.again)):
            continue
        row = judge_job(drawn, emulator, cudnn)
        add_row(options.to, row)
        words = f"{row.largest} {row.at_largest}, {row.at_next}; {row.confident} {row.at_confident}"
        why = f"{row.cause} {row.failure[:150]}"
        print(f"{row.number} {row.model} {row.gpu}: {words}: {row.verdict} {why} {row.seconds}", flush=True)


if __name__ == "__main__":
    main()
