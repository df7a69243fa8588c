"""Compare our largest batches with those that timm published for mixed-precision training.

    python -m benchmarks.published.timm_brackets [--models REGEX] [--to PATH]

Reads benchmarks/published/timm_train_rtx3090.csv (its README gives the origin and the loop): for each model
and memory format a batch that trained and the next larger candidate, which did not. Traces the same loop,
looks for the largest batch that the card holds, prints each row with its verdict and, for misses, the memory
needed at the boundary over the card's, less 1; then the share inside and the misses by cause. Writes the rows
to PATH (by default beside this file).

The card is an RTX 3090 of which torch sees 24,268 MiB. What lies outside the allocator is no fact of the
runs. On that card and with torch 1.12, which loads all kernels at once, others measured 1,690 MiB while CNNs
trained with cudnn.benchmark, as here, and 1,024 MiB for transformers, which need no cuDNN
(context_overhead.csv of the same collection). Every model here begins with a convolution, so the verdicts are
those of 1,690; the share inside is printed for the other figure and the middle too.

The loop with today's torch: SGD in a loop over parameters, since `foreach` was opt-in in torch 1.12 (from
memory: the default on CUDA came with torch 2.0), gradients filled with zeros, and unfused attention in timm,
which had no other. Not reproduced: the lists of autocast, the formulas of autograd and the kernels are those
of the installed torch.
"""

import argparse
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

os.environ["TIMM_FUSED_ATTN"] = "0"  # read when timm is imported

from benchmarks.published.allocator import replay_published
from benchmarks.rows import read_lines, write_lines
from planner.capture.session import record
from planner.errors import PlannerError
from planner.hardware.device import MIB
from planner.jobs import PUBLISHED, Job, MemoryFormat, Optimizer, OptimizerImpl, Precision, parse_tensor_spec
from planner.program.events import Outcome, Trace
from planner.program.fit import NotAffineError, fit_traces

HERE = Path(__file__).resolve().parent
BRACKETS = HERE / "timm_train_rtx3090.csv"
TOTAL_MIB = 24_268
OUTSIDE_MIB = 1_690  # soodoshll/perfpred, scripts/mem/cnn.py, through context_overhead.csv
OTHER_OUTSIDE_MIB = (1_024, 1_357)  # the same source's for transformers, and the middle
AMPERE = (8, 6)


@dataclass(frozen=True, slots=True)
class Row:
    """One bracket and our answer."""

    model: str
    memory_format: str
    family: str
    trained: int  # the batch that ran
    failed: int  # the next larger candidate
    largest: int = 0  # ours
    verdict: str = ""  # inside, too high, too low, or failure
    off_percent: float = (
        0.0  # of misses: needed over available memory at the batch that is judged wrong, less 1
    )
    inside_with_others: tuple[bool, ...] = (False, False)  # for each of OTHER_OUTSIDE_MIB
    failure: str = ""


def main() -> None:
    """Judge, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="", metavar="REGEX", help="only models that this matches")
    parser.add_argument("--to", type=Path, default=HERE / "timm_brackets.csv", metavar="PATH")
    options = parser.parse_args()
    brackets = [line for line in read_lines(BRACKETS) if re.search(options.models, line["model"])]
    if not brackets:
        parser.error(f"--models {options.models}: no model's name matches")
    rows = []
    for number, bracket in enumerate(brackets, start=1):
        print(f"{number}/{len(brackets)} {bracket['model']}", file=sys.stderr, flush=True)
        rows.append(judge(bracket))
        print(one_line(rows[-1]), flush=True)
    write(rows, options.to)
    print(summary(rows))


def job_of(bracket: dict[str, str]) -> Job:
    """Return the job of the loop that timm ran."""
    size = bracket["img_size"]
    return Job(
        model=f"timm:{bracket['model']}",
        inputs=(parse_tensor_spec(f"3x{size}x{size}"),),
        target=parse_tensor_spec("scalar:int64"),
        optimizer=Optimizer.NESTEROV,
        optimizer_impl=OptimizerImpl.FOR_LOOP,
        keep_grads=True,
        steps=2,  # from the second on, every step is like the one before
        precision=Precision.AMP_FP16,
        backward_in_autocast=True,
        memory_format=MemoryFormat(bracket["memory_format"]),
        cudnn_benchmark=True,
        cudnn=PUBLISHED,  # torch 1.12
    )


def judge(bracket: dict[str, str]) -> Row:
    """Judge one bracket by a trace at each of its ends, and the line through both for other batches."""
    trained, failed = int(bracket["fitted_batch"]), int(bracket["next_larger_candidate_that_oomed"])
    row = Row(bracket["model"], bracket["memory_format"], bracket["module_now"], trained, failed)
    job = job_of(bracket)
    try:
        ends = {batch: record(job, batch, AMPERE) for batch in (trained, failed)}
    except PlannerError as error:
        return replace(row, verdict="failure", failure=str(error))
    try:
        program = fit_traces(ends[trained], ends[failed])
    except NotAffineError:
        program = None

    def holds(batch: int, mib: int) -> bool:
        trace = ends.get(batch) or (program.instantiate(batch) if program else record(job, batch, AMPERE))
        return replay_published(trace, batch, mib * MIB).outcome is not Outcome.DOES_NOT_FIT

    room, *others = (TOTAL_MIB - outside for outside in (OUTSIDE_MIB, *OTHER_OUTSIDE_MIB))
    ours = [(holds(trained, mib), holds(failed, mib)) for mib in (room, *others)]
    inside = [pair == (True, False) for pair in ours]
    row = replace(row, inside_with_others=tuple(inside[1:]))
    if inside[0]:
        largest = bisect(lambda batch: holds(batch, room), trained, failed)
        return replace(row, largest=largest, verdict="inside")
    verdict, wrong = ("too high", failed) if ours[0][1] else ("too low", trained)
    low, high = (failed, 2 * failed) if ours[0][1] else (0, trained)
    largest = bisect(lambda batch: holds(batch, room), low, high)
    off_percent = 100 * (needed_mib(ends[wrong], wrong) / room - 1)
    return replace(row, largest=largest, verdict=verdict, off_percent=round(off_percent, 1))


def bisect(holds: Callable[[int], bool], low: int, high: int) -> int:
    """Return a batch size that holds and whose successor does not, from `low`, which holds, below `high`."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def needed_mib(trace: Trace, batch: int) -> int:
    """Return the least memory in MiB, to 16 MiB, in which the replay does not fail."""
    low, high = 0, replay_published(trace, batch).peak_reserved_bytes // MIB + 16
    while high - low > 16:
        middle = (low + high) // 2
        fails = replay_published(trace, batch, middle * MIB).outcome is Outcome.DOES_NOT_FIT
        low, high = (middle, high) if fails else (low, middle)
    return high


def one_line(row: Row) -> str:
    """Format a row for printing."""
    bracket = f"[{row.trained}, {row.failed})"
    off = f"{row.off_percent:+.1f} %" if row.verdict.startswith("too") else row.failure
    return f"{row.model:36} {row.memory_format:13} {bracket:>11} {row.largest:5} {row.verdict:9} {off}"


def write(rows: Iterable[Row], path: Path) -> None:
    """Write the rows as CSV."""
    lines = []
    for row in rows:
        inside = " ".join("yes" if yes else "no" for yes in row.inside_with_others)
        lines.append({**asdict(row), "inside_with_others": inside}.values())
    write_lines(path, [field.name for field in fields(Row)], lines)


def cause(row: Row) -> str:
    """Return the cause of a miss, as far as is known."""
    if row.verdict == "failure":
        return "no trace"
    if any(row.inside_with_others):
        return "inside with less outside the allocator"
    if row.family == "tresnet":
        return "another model: timm 0.6 ran it with inplace_abn, which keeps less for the backward pass"
    if row.verdict == "too high":
        return "convolutions whose workspaces, with cudnn.benchmark on, are not modelled"
    return "unknown"


def summary(rows: list[Row]) -> str:
    """Format the shares inside, and the misses by cause."""
    verdicts = Counter(row.verdict for row in rows)
    others = [sum(row.inside_with_others[place] for row in rows) / len(rows) for place in (0, 1)]
    lines = [
        "",
        f"{len(rows)} brackets: " + ", ".join(f"{verdict} {count}" for verdict, count in verdicts.items()),
        f"inside: {verdicts['inside'] / len(rows):.1%} with {OUTSIDE_MIB} MiB outside the allocator, "
        + ", ".join(f"{share:.1%} with {mib}" for share, mib in zip(others, OTHER_OUTSIDE_MIB, strict=True)),
        "misses by cause:",
    ]
    misses = [row for row in rows if row.verdict != "inside"]
    for reason, count in Counter(map(cause, misses)).most_common():
        those = [row for row in misses if cause(row) == reason]
        off = ", ".join(f"{row.model} {row.memory_format} {row.off_percent:+.1f} %" for row in those)
        lines.append(f"  {count} {reason}: {off}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
