"""Plan every classification model of torchvision on one card, training and inference.

    python -m benchmarks.models.torchvision [--models REGEX] [--gpu-mib 24000] [--to PATH]

Prints each plan as it is made and writes PATH.md and PATH.csv (by default beside this file), the same
figures for people and for programs. A model that cannot be planned is a row with its reason. With
--models the other rows stay. Everything but the seconds is the same in every run.
"""

import argparse
import csv
import os
import platform
import re
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

from benchmarks.models.table import listing, unknown_ops
from planner.allocator.config import AllocatorRules
from planner.capture.models.torchvision.shim import prepare_torchvision
from planner.capture.session import record
from planner.errors import PlannerError
from planner.hardware.budget import Budget, make_budget
from planner.hardware.device import MIB, generic_device
from planner.jobs import Mode, resolve_job
from planner.planning.max_batch import plan_max_batch
from planner.program.events import Trace

HERE = Path(__file__).resolve().parent
CONFIDENCE = 0.99  # the planner's default
MODES = (Mode.TRAIN, Mode.INFER)
_KINDS = ("allocated", "reserved", "process")


@dataclass(frozen=True, slots=True)
class Row:
    """One plan, or the reason that there is none."""

    model: str
    mode: Mode
    largest_batch: int = 0
    comfortable_batch: int = 0  # the largest that fits without retries
    allocated_mib: float | None = None  # these three at the largest batch; None where not even 1 fits
    reserved_mib: float | None = None
    process_mib: float | None = None
    traces: int = 0
    not_affine: str = ""  # why each probe was traced by itself; "" where two traces gave every batch size
    unknown_ops: tuple[str, ...] = ()
    failure: str = ""
    trace_seconds: float = 0.0  # all traces of the plan, the building of the model included
    search_seconds: float = 0.0  # the rest of the plan: alignment, search, replays


def main() -> None:
    """Plan, print, write."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument(
        "--models", default="", metavar="REGEX", help="only models that this matches; others stay"
    )
    parser.add_argument("--gpu-mib", type=int, default=24_000, metavar="N", help="total memory of the card")
    parser.add_argument("--to", type=Path, default=HERE / "torchvision", metavar="PATH")
    options = parser.parse_args()
    known = classification_models()
    names = [name for name in known if re.search(options.models, name)]
    if not names:
        parser.error(f"--models {options.models}: no model's name matches")
    budget = make_budget(generic_device(options.gpu_mib), CONFIDENCE, AllocatorRules())
    plan_model(names[0], Mode.TRAIN, budget)  # so that no row pays for what torch loads on first use
    rows = []
    for number, name in enumerate(names, start=1):
        print(f"{number}/{len(names)} {name}", file=sys.stderr, flush=True)
        for mode in MODES:
            rows.append(plan_model(name, mode, budget))
            print(one_line(rows[-1]), flush=True)
    rows = with_earlier(rows, known, options.to.with_suffix(".csv"))
    write_csv(rows, options.to.with_suffix(".csv"))
    options.to.with_suffix(".md").write_text(report(rows, options.gpu_mib))


def classification_models() -> list[str]:
    """The models of torchvision.models itself, not those of its submodules for other tasks."""
    prepare_torchvision()
    import torchvision

    return sorted(torchvision.models.list_models(module=torchvision.models))


def plan_model(name: str, mode: Mode, budget: Budget, source: str = "torchvision") -> Row:
    """Plan one model in one mode, under the defaults of the command line."""
    taken: list[int] = []
    trace_seconds = 0.0
    start = time.process_time()

    def traced(batch: int) -> Trace:
        nonlocal trace_seconds
        taken.append(batch)
        begun = time.process_time()
        try:
            return record(job, batch, budget.device.capability)
        finally:
            trace_seconds += time.process_time() - begun

    try:
        job = resolve_job(f"{source}:{name}", {}, mode=mode.value)
        plan = plan_max_batch(job, budget, traced)
    except PlannerError as error:
        return Row(name, mode, traces=len(taken), failure=str(error), trace_seconds=trace_seconds)
    seconds = time.process_time() - start - trace_seconds
    best = plan.at_max
    shown = best or plan.first_failure
    anew = len(taken) > 3  # two traces for the line and one that confirms it
    return Row(
        name,
        mode,
        plan.search.largest,
        plan.search.comfortable,
        best.run.peak_allocated_bytes / MIB if best else None,
        best.run.peak_reserved_bytes / MIB if best else None,
        best.process_bytes / MIB if best else None,
        len(taken),
        next((note for note in shown.notes if "straight line" in note), "") if anew and shown else "",
        shown.unknown_ops if shown else (),
        "" if best else "not even batch 1 fits",
        trace_seconds,
        seconds,
    )


def one_line(row: Row) -> str:
    """A plan, as it is printed while the others run."""
    name = f"{row.model:20} {row.mode:5} "
    seconds = f"{row.traces:2} traces {row.trace_seconds:6.2f} s, search {row.search_seconds:5.2f} s"
    if row.failure:
        return f"{name} {row.failure}  {seconds}"
    return (
        f"{name} batch {row.largest_batch:7,} (without retries {row.comfortable_batch:7,})  "
        f"allocated {row.allocated_mib:8.1f}  reserved {row.reserved_mib:8.1f}  "
        f"process {row.process_mib:8.1f} MiB  {seconds}  {row.not_affine}"
    ).rstrip()


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """One line for each plan."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            figures = asdict(row) | {"unknown_ops": " ".join(row.unknown_ops)}
            writer.writerow(
                {key: f"{value:.3f}" if isinstance(value, float) else value for key, value in figures.items()}
            )


def with_earlier(rows: Sequence[Row], names: Sequence[str], path: Path) -> list[Row]:
    """The rows in the order of all names, those of an earlier run where a model was not planned in this."""
    found = {(row.model, row.mode): row for row in (*read_csv(path), *rows)}
    return [found[name, mode] for name in names for mode in MODES if (name, mode) in found]


def read_csv(path: Path) -> list[Row]:
    """The rows of an earlier run; none where there was none."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [_row(line) for line in csv.DictReader(file)]


def _row(line: Mapping[str, str]) -> Row:
    of_mib = (float(line[f"{kind}_mib"]) if line[f"{kind}_mib"] else None for kind in _KINDS)
    return Row(
        line["model"],
        Mode(line["mode"]),
        int(line["largest_batch"]),
        int(line["comfortable_batch"]),
        *of_mib,
        traces=int(line["traces"]),
        not_affine=line["not_affine"],
        unknown_ops=tuple(line["unknown_ops"].split()),
        failure=line["failure"],
        trace_seconds=float(line["trace_seconds"]),
        search_seconds=float(line["search_seconds"]),
    )


def report(rows: Sequence[Row], gpu_mib: int) -> str:
    """The table as Markdown, with what stands out below it."""
    parts = [
        "# Every classification model of torchvision, planned",
        f"Written by `python -m benchmarks.models.torchvision`: the largest batch on a generic card of "
        f"{gpu_mib:,} MiB at confidence {CONFIDENCE}, three steps, the models' usual images (224 x 224; "
        f"Inception 299 x 299), fp32. Training: SGD, cross entropy. Inference: eval mode, no gradients. "
        f"{versions()}",
        "Allocated, reserved and process are MiB at the largest batch. A batch may fit only because cached "
        'segments are released on the way; the column "no retries" gives the largest that needs none. '
        '"exact": every size is a straight line in the batch size, from two traces and confirmed by a third; '
        '"anew": each probe was traced by itself. Seconds are those of the processor, in a process that has '
        "imported torch and torchvision: all traces of the plan with the building of the models, and all the "
        "rest of the plan.",
        "\n".join(table(rows)),
        totals(rows),
        *listing("Not planned", (f"{r.model}, {r.mode}: {r.failure}" for r in rows if r.failure)),
        *listing("Traced anew", (f"{r.model}, {r.mode}: {r.not_affine}" for r in rows if r.not_affine)),
        *listing("Operators of unknown scratch memory, with the number of models", unknown_ops(rows)),
    ]
    return "\n\n".join(parts) + "\n"


def versions() -> str:
    """What the figures depend on, and the kind of machine that the seconds are from."""
    import torchvision

    project = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text())["project"]
    cores = len(os.sched_getaffinity(0))
    return (
        f"torch {torch.__version__}, torchvision {torchvision.__version__}, planner {project['version']}, "
        f"Python {platform.python_version()}; a machine of {cores} cores without a GPU."
    )


def table(rows: Sequence[Row]) -> list[str]:
    """One line for each model, both modes side by side."""
    of: dict[str, dict[Mode, Row]] = {}
    for row in rows:
        of.setdefault(row.model, {})[row.mode] = row
    heads = ["batch", "no retries", "allocated", "reserved", "process", "sizes", "trace s", "search s"]
    names = ["model", *(f"{mode}: {head}" for mode in MODES for head in heads)]
    lines = [f"| {' | '.join(names)} |", f"|---|{'---:|' * (len(names) - 1)}"]
    for model, plans in of.items():
        lines.append(f"| {model} | {' | '.join(cell for mode in MODES for cell in cells(plans[mode]))} |")
    return lines


def cells(row: Row) -> list[str]:
    """The figures of one plan."""
    if row.failure:
        return ["fails", "", "", "", "", "", f"{row.trace_seconds:.2f}", f"{row.search_seconds:.2f}"]
    return [
        f"{row.largest_batch:,}",
        f"{row.comfortable_batch:,}",
        *(f"{mib or 0:,.1f}" for mib in (row.allocated_mib, row.reserved_mib, row.process_mib)),
        "anew" if row.not_affine else "exact",
        f"{row.trace_seconds:.2f}",
        f"{row.search_seconds:.2f}",
    ]


def totals(rows: Sequence[Row]) -> str:
    """How many plans of which kind, and how long they took."""
    seconds = sorted(row.trace_seconds + row.search_seconds for row in rows)
    failed = sum(bool(row.failure) for row in rows)
    anew = sum(bool(row.not_affine) for row in rows)
    slowest = max(rows, key=lambda row: row.trace_seconds + row.search_seconds)
    return (
        f"{len({row.model for row in rows})} models, {len(rows)} plans: {len(rows) - failed - anew} exact, "
        f"{anew} traced anew, {failed} without an answer. Together {sum(seconds):.1f} s, the median "
        f"{seconds[len(seconds) // 2]:.2f} s, the slowest {seconds[-1]:.2f} s "
        f"({slowest.model}, {slowest.mode})."
    )


if __name__ == "__main__":
    main()
