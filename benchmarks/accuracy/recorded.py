"""Jobs whose record a real GPU left, planned without a GPU and held against it, event by event.

    python -m benchmarks.accuracy.recorded FOLDER            # a line for each job
    python -m benchmarks.accuracy.recorded FOLDER --counts   # and write recorded.csv for docs/accuracy.md

FOLDER holds the records (benchmarks/accuracy/histories.py). The jobs of recorded_jobs/ are written anew
after what the records tell: operators, sizes, order, and which names live on. Each is planned for the version
of torch that ran. A record that begins with the first tensor is compared as a whole; one that begins later
is compared with the last planned steps.
"""

import argparse
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import replace

import planner
from benchmarks.accuracy.histories import card_of
from benchmarks.rows import AnyRow, write_rows
from planner.allocator.history import (
    check_history,
    compare_with_recording,
    load_published,
    recording_of,
)
from planner.allocator.history.diff import Kind
from planner.program import Alloc, Free, Phase, PhaseStart, Trace

COUNTS = Path(__file__).with_name("recorded.csv")
JOBS_FOLDER = Path(__file__).with_name("recorded_jobs")
CONVOLUTION = "aten.convolution"
_Job = TypeVar("_Job")

_SMALL = {"width": 768, "hidden": 3072, "layers": 12, "heads": 12}


class RecordedJob(NamedTuple):
    """A record, and the job that it is of."""

    record: str
    model: str  # in recorded_jobs
    batch: int
    torch: str
    gpu: str  # that it is planned for
    inputs: tuple[str, ...]
    arguments: dict[str, Any]
    steps: int
    recorded_steps: int = 1  # the last ones, if the record begins later than the first tensor
    is_emulated: bool = True  # else its version has no cuDNN that answers on an emulated GPU


@dataclass(frozen=True, slots=True)
class Comparison:
    """A job's plan beside the record."""

    record: str
    card: str  # as the record names it
    gpu: str  # that it was planned for
    torch: str  # that it was planned for
    planned: int  # allocations
    recorded: int
    matched: int  # of the same size in the same order
    other_lifetimes: int  # of these, blocks that are freed elsewhere in the order
    planned_allocated_bytes: int  # peak
    recorded_allocated_bytes: int
    planned_reserved_bytes: int
    recorded_reserved_bytes: int
    conv_workspaces: int  # of the recorded allocations, that are not planned

    @property
    def is_identical(self) -> bool:
        """Return whether all events have the same sizes and order."""
        return self.planned == self.recorded == self.matched and not self.other_lifetimes


def _small(kind: str, length: int, trains: bool) -> RecordedJob:
    inputs = f"tokens={length}:int64", "targets=scalar:int64"
    name = f"cs336-tiny-{kind}-b10x{length}-fp32"
    model = "small_transformer.py:Training"
    return RecordedJob(name, model, 10, "2.6", "RTX 4060 Ti 16GB", inputs, {"trains": trains}, 3)


def _large(name: str, batch: int, length: int, arguments: dict[str, Any]) -> RecordedJob:
    """Return a job of which one step is recorded, after five others."""
    inputs = f"tokens={length}:int64", f"targets={length}:int64"
    arguments = {"context": length} | arguments
    return RecordedJob(name, "transformer.py:Training", batch, "2.11", "RTX 4090", inputs, arguments, 6)


def _of_2_7b(
    record: str, model: str, length: int, arguments: dict[str, Any], steps: int, empties_cache: bool
) -> RecordedJob:
    """Return a job of the model of 2.7 billion parameters, of which the last step is recorded."""
    arguments = {"length": length, "empties_cache": empties_cache} | arguments
    model = f"large_transformer.py:{model}"
    name = f"cs336-2.7B-{record}-h100k"
    return RecordedJob(name, model, 4, "2.6", "H100 80GB", (f"{length}:int64",), arguments, steps)


def _passes(length: int, precision: str) -> RecordedJob:
    # The first pass of the process requests cuBLAS's workspace, those of later models do not.
    is_later = length > 128
    arguments = {"in_bfloat16": precision == "bf16"}
    return _of_2_7b(
        f"forward-b4x{length}-{precision}", "Passes", length, arguments, 1 + is_later, empties_cache=is_later
    )


def _first_step(length: int, kind: str, passes: int, steps: int, empties_cache: bool = False) -> RecordedJob:
    """Return a job whose first training step is recorded, after others whose optimizers are gone."""
    job = _of_2_7b(
        f"fullstep-b4x{length}-fp32", "FirstSteps", length, {"passes": passes}, steps, empties_cache
    )
    return job._replace(record=f"{job.record}{kind}")


_MEDIUM: dict[str, Any] = {"other_batches": 5}
_INFERENCE = _MEDIUM | {"trains": False}
JOBS = (
    *(
        RecordedJob(
            f"linear-10000x50000-b5000-{kind}", "linear.py:Calls", 5000, "2.4", "H100 80GB", ("10000",),
            {"records_gradients": kind == "grad"}, 3,
        )
        for kind in ("grad", "nograd")
    ),
    RecordedJob(
        "attention-naive-b8x4096x16-fwd-bwd", "attention.py:Passes", 8, "2.6", "RTX 4090",
        ("queries=4096x16", "keys=4096x16", "values=4096x16"), {}, 1,
    ),
    *(_small("forward", length, trains=False) for length in (100, 150, 200)),
    *(_small("train", length, trains=True) for length in (100, 150, 200)),
    *(_passes(length, precision) for precision in ("fp32", "bf16") for length in (128, 256, 512)),
    # The first backward pass of a process requests a workspace of cuBLAS as well.
    _first_step(128, "-first", passes=0, steps=1),
    _first_step(128, "-second", passes=1, steps=2),
    _first_step(128, "-emptycache", passes=1, steps=2, empties_cache=True),
    _first_step(256, "", passes=0, steps=2, empties_cache=True),
    *(_large(f"cs336-medium-inference-b4x{n}-fp32", 4, n, _INFERENCE) for n in (128, 256, 1024)),
    _large("cs336-medium-inference-b4x512-bf16", 4, 512, _INFERENCE | {"in_bfloat16": True}),
    *(_large(f"cs336-medium-fullstep-b4x{length}-fp32", 4, length, _MEDIUM) for length in (128, 256)),
    _large("cs336-medium-fullstep-b4x512-bf16", 4, 512, _MEDIUM | {"in_bfloat16": True}),
    _large("cs336-small-step-b32x256-windows", 32, 256, _SMALL | {"updates": False}),
    # Of torch 2.3 and 2.2, whose rules are not known, and whose cuDNN 8 does not answer.
    RecordedJob(
        "mlp-toy-adam", "mlp.py:Training", 64, "2.4", "RTX 4090", ("1",), {"samples": 64}, 17, 17, False,
    ),
    RecordedJob(
        "resnet50-sgd-b1x224-pytorch-blog", "images.py:Training", 1, "2.4", "A100-40GB",
        ("3x224x224", "1000:float32"), {"keeps_batch": True, "keeps_loss": False}, 6, 3, False,
    ),
)  # fmt: skip


def compare(job: RecordedJob, folder: Path) -> Comparison:
    """Plan a job and hold it against its record."""
    history = load_published(folder / f"{job.record}.json.gz").history
    options: dict[str, Any] = {"input": list(job.inputs), "model_arg": job.arguments}
    plan = planner.explain(
        str(JOBS_FOLDER / job.model), job.batch, gpu=job.gpu, torch=job.torch, steps=job.steps, **options
    )
    trace, peaks = plan.trace, plan.estimate.run.step_peaks
    check = check_history(history)
    if history.start:
        trace, peaks = steps_from(trace, job.steps - job.recorded_steps + 1), peaks[-job.recorded_steps :]
    difference = compare_with_recording(trace, recording_of(history, job.record))
    return Comparison(
        job.record,
        card_of(history.gpu),
        job.gpu,
        job.torch,
        difference.traced_allocations,
        difference.recorded_allocations,
        difference.matched,
        len(difference.lives),
        max(peak.allocated_bytes for peak in peaks),
        check.peak_allocated_bytes,
        max(peak.reserved_bytes for peak in peaks),
        check.peak_reserved_bytes,
        sum(one.kind is Kind.WORKSPACE and one.op.startswith(CONVOLUTION) for one in difference.extras),
    )


def steps_from(trace: Trace, first: int) -> Trace:
    """Return the events of the steps from the first one on, without the ends of blocks from before."""
    starts = [(at, e) for at, e in enumerate(trace.events) if isinstance(e, PhaseStart) and e.step >= first]
    begin = next(at for at, e in starts if e.phase is not Phase.END)
    end = next((at for at, e in starts if e.phase is Phase.END), len(trace.events))
    made: set[int] = set()
    events = []
    for event in trace.events[begin:end]:
        if isinstance(event, Alloc):
            made.add(event.block)
        if not isinstance(event, Free) or event.block in made:
            events.append(event)
    return replace(trace, events=tuple(events), provenance=())


def compare_all(
    description: str | None,
    jobs: Iterable[_Job],
    compare_one: Callable[[_Job, Path], AnyRow],
    text_of: Callable[[AnyRow], str],
    table: Path,
    kind: type[AnyRow],
) -> None:
    """Print a line for the comparison of each job with its record, and write their table with `--counts`."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=layout)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--counts", action="store_true", help=f"write {table.name}")
    options = parser.parse_args()
    rows = []
    for job in jobs:
        rows.append(compare_one(job, options.folder))
        print(text_of(rows[-1]), flush=True)
    if options.counts:
        write_rows(table, kind, rows)


def _text(row: Comparison) -> str:
    verdict = "identical" if row.is_identical else "differs"
    figures = " ".join(map(str, astuple(row)[8:]))
    return f"{row.record}: {row.matched} of {row.recorded} allocations, {verdict} {figures}"


if __name__ == "__main__":
    compare_all(__doc__, JOBS, compare, _text, COUNTS, Comparison)
