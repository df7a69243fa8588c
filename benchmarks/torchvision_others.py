"""Plan torchvision's models for other tasks than classification: segmentation, video, flow, detection.

    python benchmarks/torchvision_others.py [--models REGEX] [--to PATH]

The shapes of detectors depend on values, so each probe of a search would be a run of its own with values
drawn on the CPU: they are estimated at two batch sizes instead. Writes PATH.md and PATH.csv (by default
beside this file), PATH_detection.csv for the detectors; see model_table.py.
"""

import csv
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from model_table import CONFIDENCE, GPU_MIB, MODES, Entry, listing, parse, plan_all, report, unknown_ops
from model_table import Row as PlanRow

from planner.allocator_rules import AllocatorRules
from planner.budget import make_budget
from planner.device import MIB, generic_device
from planner.errors import PlannerError
from planner.job import Mode
from planner.plan import estimate
from planner.resolve import resolve_job
from planner.trace import trace
from planner.trace.torchvision_shim import prepare_torchvision

NAME = "torchvision_others"
TITLE = "torchvision's models for segmentation, video and optical flow, planned"
ABOUT = (
    "The usual crops and clips of each (planner/samples.py); training: SGD, cross entropy per pixel or per "
    "clip, mean squares for flow. Inference: eval mode, no gradients."
)
BATCHES = (2, 4)


@dataclass(frozen=True, slots=True)
class Row:
    """A detector at one batch size, or the reason why not."""

    model: str
    mode: Mode
    batch: int
    allocated_mib: float = 0.0
    reserved_mib: float = 0.0
    process_mib: float = 0.0
    seconds: float = 0.0
    unknown_ops: tuple[str, ...] = ()
    notes: str = ""
    failure: str = ""


def main() -> None:
    """Plan, print, write."""
    options = parse(NAME, TITLE)
    rows = plan_all([entry for entry in entries() if options.chooses(entry.label)], options.to)
    detected = [
        estimate_row(name, mode, batch)
        for name in names_of("detection")
        if options.chooses(name)
        for mode in MODES
        for batch in BATCHES
    ]
    write_csv(detected, options.to.with_name(f"{options.to.name}_detection.csv"))
    text = report(rows, NAME, TITLE, ABOUT, ["torchvision"]) + "\n" + detection_report(detected)
    options.to.with_suffix(".md").write_text(text)


def names_of(group: str) -> list[str]:
    """What torchvision lists in one of its modules of models."""
    prepare_torchvision()
    from torchvision import models

    return sorted(models.list_models(module=getattr(models, group)))


def entries() -> list[Entry]:
    """All but the detectors; quantized models are told why they are left out."""
    quantized = "quantized kernels run on the CPU alone"
    planned = [
        Entry(name, f"torchvision:{group}.{name}")
        for group in ("segmentation", "video", "optical_flow")
        for name in names_of(group)
    ]
    return planned + [Entry(name, f"torchvision:quantization.{name}", skipped=quantized)
                      for name in names_of("quantization")]  # fmt: skip


def estimate_row(name: str, mode: Mode, batch: int) -> Row:
    """The memory of one batch size of a detector."""
    budget = make_budget(generic_device(GPU_MIB), CONFIDENCE, AllocatorRules())
    start = time.process_time()
    row = Row(name, mode, batch)
    try:
        job = resolve_job(f"torchvision:detection.{name}", {}, mode=mode.value)
        found = estimate(job, trace(job, batch, budget.device.capability), batch, budget)
        row = replace(
            row,
            allocated_mib=found.run.peak_allocated_bytes / MIB,
            reserved_mib=found.run.peak_reserved_bytes / MIB,
            process_mib=found.process_bytes / MIB,
            unknown_ops=found.unknown_ops,
            notes="; ".join(found.notes),
        )
    except PlannerError as error:
        row = replace(row, failure=str(error))
    row = replace(row, seconds=time.process_time() - start)
    print(name, mode, batch, f"{row.process_mib:,.1f} MiB {row.seconds:.1f} s", row.failure, file=sys.stderr)
    return row


def detection_report(rows: Sequence[Row]) -> str:
    """The detectors' table as Markdown."""
    lines = ["| model | mode | batch | allocated | reserved | process | s |", f"|---|---|{'---:|' * 5}"]
    for row in rows:
        figures = (row.allocated_mib, row.reserved_mib, row.process_mib)
        cells = ["fails", "", ""] if row.failure else [f"{mib:,.1f}" for mib in figures]
        lines.append(f"| {row.model} | {row.mode} | {row.batch} | {' | '.join(cells)} | {row.seconds:.1f} |")
    plans = [
        PlanRow(row.model, row.mode, unknown_ops=row.unknown_ops) for row in rows if row.batch == BATCHES[0]
    ]
    parts = [
        "# torchvision's detectors, estimated",
        "How many boxes pass from one stage to the next depends on values, so sizes are no straight line in "
        "the batch size. Values are drawn at random on the CPU, as `planner/trace/real_cpu.py` says; images "
        "are of 480 x 640 with 8 objects each, three steps, SGD, the sum of the model's losses. MiB on the "
        "generic card, seconds of the processor.",
        "\n".join(lines),
        *listing(
            "Not estimated", (f"{r.model}, {r.mode}, {r.batch}: {r.failure}" for r in rows if r.failure)
        ),
        *listing("What reads values", sorted({f"{r.model}, {r.mode}: {r.notes}" for r in rows if r.notes})),
        *listing(
            "Operators of unknown scratch memory in detectors, with the number of models", unknown_ops(plans)
        ),
    ]
    return "\n\n".join(parts) + "\n"


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """One line for each estimate."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            told = asdict(row) | {"unknown_ops": " ".join(row.unknown_ops)}
            writer.writerow({k: f"{v:.1f}" if isinstance(v, float) else v for k, v in told.items()})


if __name__ == "__main__":
    main()
