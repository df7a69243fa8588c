"""Replay the first seed's notebook and hold every line against the one it printed; fills in docs/notebook.md.

    python -m benchmarks.docs.notebook [--check]

Rewrites the tables between the marks `<!-- NAME -->` and `<!-- /NAME -->` of docs/notebook.md. With --check
nothing is written, and the exit code is 1 where the page is out of date.
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from msgspec.structs import replace

from benchmarks.published.allocator import PUBLISHED
from planner.allocator.config import MemoryLimits
from planner.capture.session import record
from planner.hardware.device import unlimited_device
from planner.jobs import Job
from planner.jobs.files.catalogue import load_catalogue
from planner.planning.estimators.published import load_measured
from planner.planning.process.file import find_process_file, read_process
from planner.planning.process.model import Leave, MemoryReading, Place, Print, Process
from planner.planning.process.run import JobTracer, run_process
from planner.program.events import Trace

PAGE = Path(__file__).resolve().parents[2] / "docs" / "notebook.md"
MIB = 2**20
NOTEBOOK = "(a notebook in Japanese)"  # ends the title of its source
MODELS = {
    "Tensor variable": "tensor_1gib",
    "Convolutional Neural Network": "cnn",
    "VGG16": "vgg16_bn",
    "ResNet50": "resnet50",
    "Vision Transformer": "vit_b_16",
    "UNETR": "unetr",
}
CARD_MIB = 24_564  # an RTX 4090 as nvidia-smi shows it; an RTX 3090 has 24,576
LEFT = "Left"  # label of a reading after each function that trained

Key = tuple[str, str]  # model and point, as planner/planning/estimators/measurements names them


def main() -> None:
    """Replay, compare, write."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is stale")
    check = parser.parse_args().check
    before = PAGE.read_text(encoding="utf-8")
    after = replace_tables(before, tables())
    if check:
        sys.exit(
            0 if after == before else f"{PAGE.name} is out of date; run python -m benchmarks.docs.notebook"
        )
    PAGE.write_text(after, encoding="utf-8")


def replace_tables(text: str, tables: Mapping[str, str]) -> str:
    """Return the page with each table between its marks."""
    for name, table in tables.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        text, count = re.subn(pattern, lambda match: match[1] + table + match[2], text, flags=re.S)  # noqa: B023
        if count != 1:
            sys.exit(f"{PAGE.name}: expected the marks of {name} once, got {count}")
    return text


def tables() -> dict[str, str]:
    """Return the page's tables by the names of their marks."""
    process = read_process(find_process_file("notebook"), load_catalogue()).process
    cap_mib = CARD_MIB - round(outside_mib())
    tracer = cache(trace_generic)
    endless = readings_of(process, tracer, PUBLISHED)
    capped = readings_of(process, tracer, replace(PUBLISHED, limit_bytes=cap_mib * MIB))
    return {
        "lines": lines_table(endless),
        "reserved": reserved_table(endless, capped, cap_mib),
        "residue": residue_table(process, tracer),
    }


def trace_generic(job: Job, batch: int) -> Trace:
    """Record a trace for the generic card."""
    return record(job, batch, unlimited_device().capability)


def readings_of(process: Process, tracer: JobTracer, limits: MemoryLimits) -> dict[Key, MemoryReading]:
    """Return the readings of the process by model and point."""
    log = run_process(process, tracer, limits)
    if log.failure is not None:
        sys.exit(f"the process does not fit: {log.failure}")
    return dict(zip(keys(log.readings), log.readings, strict=True))


def keys(readings: tuple[MemoryReading, ...]) -> Iterator[Key]:
    """Name the point of a line: `train 2` is the second "Train" of its section, `end` its "Final"."""
    epochs: Counter[str] = Counter()
    for reading in readings:
        model, point = MODELS[reading.section], reading.label.lower()
        if point == "train":
            epochs[model] += 1
            point += f" {epochs[model]}"
        yield model, "end" if point == "final" else point


def printed(kind: str) -> dict[Key, float]:
    """Return the figures that the notebook printed, in MiB."""
    return {
        (figure.model, figure.point): float(figure.quantity.printed)
        for figure in load_measured().figures
        if figure.source.title.endswith(NOTEBOOK)
        and figure.source.framework == "torch"
        and figure.kind == kind
    }


def outside_mib() -> float:
    """Return the most memory in use on the GPU outside torch's allocator while models were trained.

    Contexts of CUDA, TensorFlow in the same process, and other processes.
    """
    used, reserved = printed("used"), printed("reserved")
    return max(used[key] - reserved[key] for key in used if key[1].startswith("train"))


def lines_table(ours: Mapping[Key, MemoryReading]) -> str:
    """Return the table of all lines of the process: measured, ours and the error of each figure."""
    allocated, reserved, peak = map(printed, ("allocated", "reserved", "peak_allocated"))
    head = "".join(f" {name} | ours | error |" for name in ("allocated", "reserved", "max allocated"))
    rows = [f"| line |{head}", "|---|" + "--:|" * 9]
    for key, reading in ours.items():
        cells = [
            *compared(reading.allocated_bytes, allocated.get(key)),
            *compared(reading.reserved_bytes or 0, reserved.get(key)),
            *compared(reading.peak_allocated_bytes, peak.get(key)),
        ]
        rows.append(f"| {' '.join(key)} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def compared(ours_bytes: int, real_mib: float | None) -> tuple[str, str, str]:
    """Format three cells: measured, ours, error."""
    real = "lost" if real_mib is None else f"{real_mib:,.1f}"
    return real, f"{ours_bytes / MIB:,.1f}", error(ours_bytes / MIB, real_mib)


def reserved_table(
    endless: Mapping[Key, MemoryReading], capped: Mapping[Key, MemoryReading], cap_mib: int
) -> str:
    """Return the table of memory reserved after training, without a limit and within the notebook's GPU."""
    real = printed("reserved")
    rows = [
        f"| after training | measured | ours, no end | error | ours, at most {cap_mib:,} MiB | error |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for key, reading in endless.items():
        if key[1] == "end":
            free, bound = ((of.reserved_bytes or 0) / MIB for of in (reading, capped[key]))
            errors = [error(mib, real[key]) for mib in (free, bound)]
            rows.append(
                f"| {key[0]} | {real[key]:,.1f} | {free:,.1f} | {errors[0]} | {bound:,.1f} | {errors[1]} |"
            )
    return "\n".join(rows) + "\n"


def residue_table(process: Process, tracer: JobTracer) -> str:
    """Return the table of memory that stays on the GPU after the function that trained a model."""
    steps = tuple(more for step in process for more in ((step, Print(LEFT)) if step == Leave() else (step,)))
    left = {
        model: reading.allocated_bytes / MIB
        for (model, point), reading in readings_of(steps, tracer, PUBLISHED).items()
        if point == LEFT.lower()
    }
    weights = weights_mib(process, tracer)
    rows = ["| after | allocated | new | weights and gradients |", "|---|--:|--:|--:|"]
    before = 0.0
    for model, now in left.items():
        rows.append(f"| {model} | {now:,.1f} | {now - before:,.1f} | {2 * weights[model]:,.1f} |")
        before = now
    return "\n".join(rows) + "\n"


def weights_mib(process: Process, tracer: JobTracer) -> dict[str, float]:
    """Return the memory of each model that is placed alone."""
    sizes = {}
    for step in process:
        if isinstance(step, Place):
            log = run_process((step, Print("")), tracer)
            sizes[step.model.job.model.name] = log.readings[0].allocated_bytes / MIB
    return sizes


def error(ours_mib: float, real_mib: float | None) -> str:
    """Format the error, signed, in percent of the measured figure."""
    if real_mib is None:
        return ""
    if f"{ours_mib:.1f}" == f"{real_mib:.1f}":
        return "0"
    return f"{100 * (ours_mib / real_mib - 1):+.2f} %"


if __name__ == "__main__":
    main()
