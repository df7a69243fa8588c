"""Plan many models on one GPU and write a table: the code that the benchmarks of all libraries share.

A model that cannot be planned is a row with its reason. Everything but the seconds is the same in every run.
"""

import argparse
import csv
import os
import platform
import re
import signal
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import planner
from benchmarks.rows import read_lines
from planner.errors import PlannerError

HERE = Path(__file__).resolve().parent
GPU_MIB = 24_000
MODES = ("train", "infer")
SECONDS = 240  # of the processor; a plan that takes longer is a row without an answer
COLUMNS = (
    "Allocated, reserved and process are MiB at the largest batch; parameters are MiB with the buffers. A "
    'batch may fit only because cached segments are released on the way; "no retries" is the largest that '
    'needs none. Sizes "exact": every size is affine in the batch size, from two runs and validated by a '
    'third; "anew": each probe was captured by itself. Seconds are those of the processor for the whole '
    "plan, the building of the model included, in a process that has imported the libraries. An operator of "
    "unknown workspace counts with its outputs alone."
)
ANEW = "sizes are no straight line"  # how the note of a plan begins that captured each probe by itself
# Notes that stand in every plan, or repeat columns.
_COMMON_NOTES = re.compile(
    r"the CUDA context|no calibration|nothing else runs|\d+ steps|real samples vary|kernels as for"
    r"|traced with|scratch memory is not counted"
)


class TimeIsUp(BaseException):
    """A plan takes too long. It may end as the cause of a PlannerError, as what a model raises does."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One model of a table."""

    label: str
    model: str  # SOURCE:NAME
    model_arg: Mapping[str, Any] | None = None
    skipped: str = ""  # why it is not even tried


@dataclass(frozen=True, slots=True)
class Row:
    """One plan, or the reason that there is none; figures in MiB are those at the largest batch."""

    model: str
    mode: str
    sample: str = ""  # the inputs of one sample
    largest_batch: int = 0
    comfortable_batch: int = 0  # the largest that fits without retries
    parameters_mib: float = 0.0
    allocated_mib: float = 0.0
    reserved_mib: float = 0.0
    process_mib: float = 0.0
    limit_mib: float = 0.0  # of what the allocator may reserve: the GPU less context, driver and margin
    sizes: str = ""  # exact: affine in the batch size; anew: each probe was captured by itself
    seconds: float = 0.0  # of the processor, for the whole plan, the building of the model included
    unknown_ops: tuple[str, ...] = ()
    notes: str = ""
    failure: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """The plans of a benchmark, with the words around them."""

    name: str  # of the module and of the files
    title: str
    about: str
    entries: Sequence[Entry]
    libraries: Sequence[str]
    gpu_mib: int = GPU_MIB


def run(*tables: Table) -> None:
    """Plan the tables, print each plan as it is made, and write NAME.csv of each and one report.

    Rows of models that `--models` does not choose stay as the files have them.
    """
    first = tables[0]
    parser = argparse.ArgumentParser(description=first.title)
    parser.add_argument(
        "--models", default="", metavar="REGEX", help="only models that this matches; others stay as they are"
    )
    parser.add_argument("--to", type=Path, default=HERE, metavar="FOLDER")
    options = parser.parse_args()
    options.to.mkdir(exist_ok=True)
    reports = [report(table, plan_all(table, options.models, options.to)) for table in tables]
    (options.to / f"{first.name}.md").write_text("\n".join(reports))


def plan_all(table: Table, models: str, folder: Path) -> list[Row]:
    """Plan each chosen entry in each mode, and write the CSV file after each."""
    path = folder / f"{table.name}.csv"
    rows = {(row.model, row.mode): row for row in read_csv(path)}
    chosen = [entry for entry in table.entries if re.search(models, entry.label)]
    labels = [(entry.label, mode) for entry in table.entries for mode in MODES]
    for entry in chosen[:1]:
        plan_row(entry, MODES[0], table.gpu_mib)  # so that no row pays for what is loaded at first use
    for number, entry in enumerate(chosen, start=1):
        print(f"{number}/{len(chosen)} {entry.label}", file=sys.stderr, flush=True)
        for mode in MODES:
            row = rows[entry.label, mode] = plan_row(entry, mode, table.gpu_mib)
            outcome = row.failure or f"batch {row.largest_batch:7,}  {row.sizes}  {row.notes}"
            print(f"{row.model:36} {row.mode:5} {row.seconds:6.2f} s  {outcome}".rstrip(), flush=True)
            write_csv([rows[label] for label in labels if label in rows], path)
    return [rows[label] for label in labels if label in rows]


def plan_row(entry: Entry, mode: str, gpu_mib: int) -> Row:
    """Plan one model in one mode, under the defaults of the command line."""
    if entry.skipped:
        return Row(entry.label, mode, failure=entry.skipped)
    start = time.process_time()
    try:
        with time_limit(SECONDS):
            result = planner.max_batch(entry.model, mode=mode, model_arg=entry.model_arg, gpu_mib=gpu_mib)
    except (PlannerError, TimeIsUp) as error:
        reason = error.__cause__ if isinstance(error.__cause__, TimeIsUp) else error
        return Row(entry.label, mode, seconds=time.process_time() - start, failure=str(reason))
    seconds = time.process_time() - start
    plan = result.to_dict()
    best = plan["at_max"] or plan["first_failure"]
    notes = [note for note in best["assumptions"] if not _COMMON_NOTES.match(note)]
    return Row(
        entry.label,
        mode,
        "  ".join(plan["job"]["inputs"]),
        plan["max_batch"],
        plan["comfortable_batch"],
        best["breakdown_mib"]["parameters"],
        best["peak_allocated_mib"],
        best["peak_reserved_mib"],
        best["process_mib"],
        plan["device"]["allocator"]["capacity_mib"],
        "anew" if any(note.startswith(ANEW) for note in notes) else "exact",
        seconds,
        tuple(best["unknown_ops"]),
        "; ".join(notes),
        "" if plan["max_batch"] else "not even batch 1 fits",
    )


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise TimeIsUp in a block that takes more of the processor."""

    def stop(number: int, frame: object) -> None:
        raise TimeIsUp(f"no answer within {seconds} s of the processor")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Write one line for each plan."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            figures = {"unknown_ops": " ".join(row.unknown_ops), "seconds": f"{row.seconds:.2f}"}
            writer.writerow(asdict(row) | figures)


def read_csv(path: Path) -> list[Row]:
    """Read the rows of an earlier run; none if there was none."""
    if not path.exists():
        return []
    kinds = {field.name: field.type for field in fields(Row)}
    return [
        Row(**{name: _value(text, kinds[name]) for name, text in line.items()}) for line in read_lines(path)
    ]


def _value(text: str, kind: Any) -> Any:
    return tuple(text.split()) if kind == tuple[str, ...] else kind(text)


def report(table: Table, rows: Sequence[Row]) -> str:
    """Return the table as Markdown, with outliers below it."""
    notes = sorted(f"{row.model}, {row.mode}: {row.notes}" for row in rows if row.notes and not row.failure)
    parts = [
        f"# {table.title}",
        f"Written by `python -m benchmarks.models.{table.name.removesuffix('_detection')}`: the largest "
        f"batch on a generic GPU of {table.gpu_mib:,} MiB at confidence 0.99, three steps, fp32; "
        f"computed, not measured. {table.about} {_versions(table.libraries)}",
        COLUMNS,
        "\n".join(_table(rows)),
        _totals(rows),
        *_listing("Not planned", (f"{row.model}, {row.mode}: {row.failure}" for row in rows if row.failure)),
        *_listing("Notes", notes),
        *_listing("Operators of unknown workspace, with the number of models", _unknown_ops(rows)),
    ]
    return "\n\n".join(parts) + "\n"


def _versions(libraries: Sequence[str]) -> str:
    """Return the versions that the figures depend on, and the kind of machine of the seconds."""
    project = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text())["project"]
    versions = ", ".join(f"{library} {version(library)}" for library in ("torch", *libraries))
    cores = len(os.sched_getaffinity(0))
    return (
        f"{versions}, planner {project['version']}, Python {platform.python_version()}; a machine of {cores} "
        "cores without a GPU."
    )


def _table(rows: Sequence[Row]) -> list[str]:
    """Return one line for each model, both modes side by side."""
    by_model: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_model.setdefault(row.model, {})[row.mode] = row
    heads = ["batch", "no retries", "allocated", "reserved", "process", "sizes", "s", "unknown"]
    names = ["model", "parameters", "sample", *(f"{mode}: {head}" for mode in MODES for head in heads)]
    lines = [f"| {' | '.join(names)} |", f"|---|---:|---|{'---:|' * (len(names) - 3)}"]
    for model, plans in by_model.items():
        planned = max(plans.values(), key=lambda row: (len(row.sample), row.parameters_mib))
        cells = [model, f"{planned.parameters_mib:,.1f}", planned.sample]
        cells += [cell for mode in MODES for cell in _cells(plans[mode])]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _cells(row: Row) -> list[str]:
    if row.failure:
        return ["fails", *[""] * 5, f"{row.seconds:.2f}", ""]
    figures = (row.allocated_mib, row.reserved_mib, row.process_mib)
    batches = (f"{row.largest_batch:,}", f"{row.comfortable_batch:,}")
    sizes = (f"{figure:,.1f}" for figure in figures)
    return [*batches, *sizes, row.sizes, f"{row.seconds:.2f}", str(len(row.unknown_ops))]


def _totals(rows: Sequence[Row]) -> str:
    """Return the number of plans of each kind, and their time."""
    seconds = sorted(row.seconds for row in rows)
    kinds = Counter("failed" if row.failure else row.sizes for row in rows)
    slowest = max(rows, key=lambda row: row.seconds)
    whole = {row.model for row in rows} - {row.model for row in rows if row.failure}
    return (
        f"{len({row.model for row in rows})} models, {len(whole)} of them planned in both modes; {len(rows)} "
        f"plans: {kinds['exact']} exact, {kinds['anew']} captured again, "
        f"{kinds['failed']} without an answer. Together {sum(seconds):.1f} s, the median "
        f"{seconds[len(seconds) // 2]:.2f} s, the slowest {seconds[-1]:.2f} s "
        f"({slowest.model}, {slowest.mode})."
    )


def _unknown_ops(rows: Sequence[Row]) -> Iterable[str]:
    """Yield each operator whose workspace is unknown, by the number of models that run it."""
    counts: Mapping[str, Counter[str]] = {mode: Counter() for mode in MODES}
    for row in rows:
        counts[row.mode].update(row.unknown_ops)
    names = {op for counter in counts.values() for op in counter}
    for op in sorted(names, key=lambda op: (-sum(counts[mode][op] for mode in MODES), op)):
        yield f"`{op}`: " + ", ".join(f"{mode} {counts[mode][op]}" for mode in MODES)


def _listing(title: str, lines: Iterable[str]) -> list[str]:
    items = [f"- {line}" for line in lines]
    return [f"## {title}", "\n".join(items) or "None."]
