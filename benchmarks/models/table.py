"""Plans of many models on one card as a table: how the benchmarks of one library each share their code.

A model that cannot be planned is a row with its reason. Everything but the seconds is the same in every run.
"""

import argparse
import csv
import os
import platform
import re
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from planner.allocator.config import AllocatorRules
from planner.capture.models.registry import build_model, complete_by_library
from planner.capture.session import record
from planner.errors import PlannerError
from planner.hardware.budget import Budget, make_budget
from planner.hardware.device import generic_device
from planner.jobs import Job, Mode, resolve_job
from planner.planning.max_batch import Plan, plan_max_batch
from planner.program.events import Trace

HERE = Path(__file__).resolve().parent
CONFIDENCE = 0.99  # the planner's default
GPU_MIB = 24_000
MODES = (Mode.TRAIN, Mode.INFER)
ANEW = "sizes are no straight line"  # how the note of a plan begins that traced each probe by itself


@dataclass(frozen=True, slots=True)
class Entry:
    """One model of the table."""

    label: str
    model: str  # SOURCE:NAME
    model_args: tuple[tuple[str, Any], ...] = ()
    skipped: str = ""  # why it is not even tried


@dataclass(frozen=True, slots=True)
class Row:
    """One plan, or the reason that there is none."""

    model: str
    mode: Mode
    parameters: int = 0
    sample: str = ""  # the inputs of one sample
    largest_batch: int = 0
    sizes: str = ""  # exact: a straight line in the batch size; anew: each probe was traced by itself
    traces: int = 0
    seconds: float = 0.0  # of the processor, for the whole plan, the building of the model included
    unknown_ops: tuple[str, ...] = ()
    notes: str = ""
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line of a table takes."""

    models: str
    to: Path

    def chooses(self, label: str) -> bool:
        return re.search(self.models, label) is not None


def parse(name: str, title: str) -> Options:
    """The options of `benchmarks/NAME.py`."""
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument(
        "--models", default="", metavar="REGEX", help="only models that this matches; others stay as they are"
    )
    parser.add_argument("--to", type=Path, default=HERE / name, metavar="PATH")
    given = parser.parse_args()
    return Options(given.models, given.to)


def run(entries: Sequence[Entry], name: str, title: str, about: str, libraries: Sequence[str]) -> None:
    """Plan, print, write PATH.md and PATH.csv; `about` says what the models are."""
    options = parse(name, title)
    rows = plan_all(entries, options)
    options.to.with_suffix(".md").write_text(report(rows, name, title, about, libraries))


def plan_all(
    entries: Sequence[Entry], options: Options, suffix: str = "", gpu_mib: int = GPU_MIB
) -> list[Row]:
    """Plan each chosen entry in each mode, print the plans as they are made, and write TO + SUFFIX.csv.

    The rows of entries that are not chosen stay as that file has them.
    """
    path = options.to.with_name(f"{options.to.name}{suffix}.csv")
    budget = make_budget(generic_device(gpu_mib), CONFIDENCE, AllocatorRules())
    known = {(row.model, row.mode): row for row in read_csv(path)}
    chosen = [entry for entry in entries if options.chooses(entry.label)]
    labels = [(entry.label, mode) for entry in entries for mode in MODES]
    for number, entry in enumerate(chosen, start=1):
        print(f"{number}/{len(chosen)} {entry.label}", file=sys.stderr, flush=True)
        for mode in MODES:
            row = known[entry.label, mode] = plan_row(entry, mode, budget)
            print(one_line(row), flush=True)
            write_csv([known[label] for label in labels if label in known], path)
    return [known[label] for label in labels if label in known]


def plan_row(entry: Entry, mode: Mode, budget: Budget) -> Row:
    """Plan one model in one mode, under the defaults of the command line."""
    if entry.skipped:
        return Row(entry.label, mode, failure=entry.skipped)
    parameters, taken = 0, 0
    start = time.process_time()

    def build(job: Job) -> nn.Module:
        nonlocal parameters
        model = build_model(job)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        return model

    def traced(batch: int) -> Trace:
        nonlocal taken
        taken += 1
        return record(job, batch, budget.device.capability, build)

    try:
        job = resolve_job(entry.model, {}, mode=mode.value, model_args=entry.model_args)
        job = complete_by_library(job)
        plan = plan_max_batch(job, budget, traced)
    except PlannerError as error:
        seconds = time.process_time() - start
        return Row(entry.label, mode, parameters, traces=taken, seconds=seconds, failure=str(error))
    return _row(entry, mode, parameters, plan, taken, time.process_time() - start)


def _row(entry: Entry, mode: Mode, parameters: int, plan: Plan, taken: int, seconds: float) -> Row:
    best = plan.at_max or plan.first_failure
    assert best is not None  # a batch size fits or does not
    anew = any(note.startswith(ANEW) for note in best.notes)
    return Row(
        entry.label,
        mode,
        parameters,
        "  ".join(map(str, plan.job.inputs)),
        plan.search.largest,
        "anew" if anew else "exact",
        taken,
        seconds,
        best.unknown_ops,
        "; ".join(best.notes),
        "" if plan.at_max else "not even batch 1 fits",
    )


def one_line(row: Row) -> str:
    """A plan, as it is printed while the others run."""
    told = row.failure or f"batch {row.largest_batch:7,}  {row.sizes}  {row.notes}"
    return f"{row.model:36} {row.mode:5} {row.parameters:13,} {row.seconds:6.2f} s  {told}".rstrip()


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """One line for each plan."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            figures = asdict(row) | {
                "unknown_ops": " ".join(row.unknown_ops),
                "seconds": f"{row.seconds:.2f}",
            }
            writer.writerow(figures)


def read_csv(path: Path) -> list[Row]:
    """The rows of an earlier run; none where there was none."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [
            Row(
                line["model"],
                Mode(line["mode"]),
                int(line["parameters"]),
                line["sample"],
                int(line["largest_batch"]),
                line["sizes"],
                int(line["traces"]),
                float(line["seconds"]),
                tuple(line["unknown_ops"].split()),
                line["notes"],
                line["failure"],
            )
            for line in csv.DictReader(file)
        ]


def report(
    rows: Sequence[Row], name: str, title: str, about: str, libraries: Sequence[str], gpu_mib: int = GPU_MIB
) -> str:
    """The table as Markdown, with what stands out below it."""
    told = sorted(f"{row.model}, {row.mode}: {row.notes}" for row in rows if row.notes and not row.failure)
    parts = [
        f"# {title}",
        f"Written by `python benchmarks/{name}.py`: the largest batch on a generic card of {gpu_mib:,} MiB "
        f"at confidence {CONFIDENCE}, three steps, fp32. {about} {_versions(libraries)}",
        'Sizes "exact": every size is a straight line in the batch size, from two traces and confirmed by a '
        'third; "anew": each probe was traced by itself. Seconds are those of the processor for the whole '
        "plan, the building of the model included, in a process that has imported the libraries. An operator "
        "of unknown scratch memory counts with its outputs alone.",
        "\n".join(table(rows)),
        totals(rows),
        *listing("Not planned", (f"{row.model}, {row.mode}: {row.failure}" for row in rows if row.failure)),
        *listing("Notes", told),
        *listing("Operators of unknown scratch memory, with the number of models", unknown_ops(rows)),
    ]
    return "\n\n".join(parts) + "\n"


def _versions(libraries: Sequence[str]) -> str:
    """What the figures depend on, and the kind of machine that the seconds are from."""
    project = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text())["project"]
    told = ", ".join(f"{library} {version(library)}" for library in ("torch", *libraries))
    cores = len(os.sched_getaffinity(0))
    return (
        f"{told}, planner {project['version']}, Python {platform.python_version()}; a machine of {cores} "
        "cores without a GPU."
    )


def table(rows: Sequence[Row]) -> list[str]:
    """One line for each model, both modes side by side."""
    of: dict[str, dict[Mode, Row]] = {}
    for row in rows:
        of.setdefault(row.model, {})[row.mode] = row
    heads = ["batch", "sizes", "s", "unknown"]
    names = ["model", "parameters", "sample", *(f"{mode}: {head}" for mode in MODES for head in heads)]
    lines = [f"| {' | '.join(names)} |", f"|---|---:|---|{'---:|' * (len(names) - 3)}"]
    for model, plans in of.items():
        known = max(plans.values(), key=lambda row: (len(row.sample), row.parameters))
        cells = [model, f"{known.parameters:,}", known.sample]
        cells += [cell for mode in MODES for cell in _cells(plans[mode])]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _cells(row: Row) -> list[str]:
    if row.failure:
        return ["fails", "", f"{row.seconds:.2f}", ""]
    return [f"{row.largest_batch:,}", row.sizes, f"{row.seconds:.2f}", str(len(row.unknown_ops))]


def totals(rows: Sequence[Row]) -> str:
    """How many plans of which kind, and how long they took."""
    seconds = sorted(row.seconds for row in rows)
    kinds = Counter("failed" if row.failure else row.sizes for row in rows)
    slowest = max(rows, key=lambda row: row.seconds)
    whole = {row.model for row in rows} - {row.model for row in rows if row.failure}
    return (
        f"{len({row.model for row in rows})} models, {len(whole)} of them planned in both modes; {len(rows)} "
        f"plans: {kinds['exact']} exact, {kinds['anew']} traced anew, {kinds['failed']} without an answer. "
        f"Together {sum(seconds):.1f} s, the median {seconds[len(seconds) // 2]:.2f} s, the slowest "
        f"{seconds[-1]:.2f} s ({slowest.model}, {slowest.mode})."
    )


class Planned(Protocol):
    """As much of a row as tells what the planner does not know."""

    @property
    def mode(self) -> Mode: ...

    @property
    def unknown_ops(self) -> tuple[str, ...]: ...


def unknown_ops(rows: Sequence[Planned]) -> Iterable[str]:
    """Each operator whose scratch memory the planner does not know, by how many models run it."""
    counts: Mapping[Mode, Counter[str]] = {mode: Counter() for mode in MODES}
    for row in rows:
        counts[row.mode].update(row.unknown_ops)
    names = {op for counter in counts.values() for op in counter}
    for op in sorted(names, key=lambda op: (-sum(counts[mode][op] for mode in MODES), op)):
        yield f"`{op}`: " + ", ".join(f"{mode} {counts[mode][op]}" for mode in MODES)


def listing(title: str, lines: Iterable[str]) -> list[str]:
    """A titled list; where it is empty, it says so."""
    found = [f"- {line}" for line in lines]
    return [f"## {title}", "\n".join(found) or "None."]
