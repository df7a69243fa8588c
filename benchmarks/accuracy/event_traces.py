"""Steps that profilers recorded on real GPUs, held against plans of the same jobs.

    python -m benchmarks.accuracy.event_traces FOLDER            # a line for each trace
    python -m benchmarks.accuracy.event_traces FOLDER --counts   # and write its table for docs/accuracy.md

FOLDER holds the traces. They have the sizes of blocks in order, but neither addresses nor what a block is
for. Each planned block that is no workspace of a convolution is looked for in the recorded step, in the
planned order: of the planned size rounded up to 512 bytes, or of up to 1 MiB more for large blocks, which are
taken whole. What the record has between two of them is held against the workspaces planned there.
"""

import gzip
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import planner
from benchmarks.accuracy.recorded import JOBS_FOLDER, compare_all, steps_from
from planner.program import Alloc, Category

COUNTS = Path(__file__).with_name("event_traces.csv")
_LARGE = 2**20
_CLASSIFIER = str(JOBS_FOLDER / "images.py:Training")


class TracedJob(NamedTuple):
    """A trace, where its compared step is, and the job that it is of."""

    trace: str
    first: int  # of the events of a step
    end: int
    model: str
    batch: int
    gpu: str  # that it is planned for
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A job's plan beside the recorded step."""

    trace: str
    gpu: str
    torch: str  # that recorded
    tensors: int  # planned allocations but for workspaces of convolutions
    found: int
    workspaces: int  # planned
    others: int  # recorded allocations beside the tensors
    alike: int  # of these, of the size of a workspace planned there


def _of_resnet(trace: str, gpu: str, first: int, end: int, batch: int, **options: Any) -> TracedJob:
    options["input"] = ["3x224x224", "scalar:int64"]
    return TracedJob(trace, first, end, _CLASSIFIER, batch, gpu, options)


_ON_V100: dict[str, Any] = {"gpu": "V100-32GB", "first": 1370, "end": 2740, "cudnn_benchmark": True}
JOBS = (
    TracedJob(
        "mlp-784-2048-1024-10-b512-adam-fp32-t4", 58, 116, _CLASSIFIER, 512, "T4",
        {"torch": "2.10", "input": ["1x28x28", "scalar:int64"], "model_arg": {"is_mlp": True}},
    ),
    TracedJob(
        "resnet50-sgd-b1x224-a10g-timeline", 6630, 7956, "torchvision:resnet50", 1, "A10G",
        {"optimizer": "sgd"},
    ),
    TracedJob(
        "resnet50-adam-b1x224-a10g-timeline", 8562, 10210, "torchvision:resnet50", 1, "A10G",
        {"optimizer": "adam"},
    ),
    _of_resnet("resnet50-sgd-b32-v100-kineto-089861", batch=32, **_ON_V100),
    _of_resnet("resnet50-sgd-b32-v100-kineto-566756", batch=32, **_ON_V100),
)  # fmt: skip
_STEPS = 4


def compare(job: TracedJob, folder: Path) -> Comparison:
    """Plan a job and hold its last step against the recorded one."""
    record = json.loads(gzip.decompress((folder / f"{job.trace}.json.gz").read_bytes()))
    plan = planner.explain(job.model, job.batch, gpu=job.gpu, steps=_STEPS, **job.options)
    planned = [
        (event.size_bytes, event.category is Category.WORKSPACE)
        for event in steps_from(plan.trace, _STEPS).events
        if isinstance(event, Alloc) and (event.category is not Category.INPUT or "input" in job.options)
    ]
    events = record["events"]["bytes"]
    if actions := record["events"].get("actions"):  # of a timeline, which begins with the blocks from before
        events = events[actions.count("p") :]
    recorded = [size for size in events[job.first : job.end] if size > 0]
    return Comparison(job.trace, job.gpu, record["torch"], *_align(planned, recorded))


def _align(planned: Sequence[tuple[int, bool]], recorded: Sequence[int]) -> tuple[int, int, int, int, int]:
    """Return the counts of a comparison, from planned (bytes, is workspace) and recorded bytes in order."""
    at = found = alike = 0
    workspaces: Counter[int] = Counter()  # planned since the last tensor
    for size, is_workspace in (*planned, (0, False)):
        size = -(-size // 512) * 512
        if is_workspace:
            workspaces[size] += 1
            continue
        place = next((to for to in range(at, len(recorded)) if _is_alike(size, recorded[to])), None)
        if size and place is None:
            continue
        alike += (workspaces & Counter(recorded[at:place])).total()
        workspaces.clear()
        if place is not None:
            at, found = place + 1, found + 1
    tensors = sum(not is_workspace for _, is_workspace in planned)
    return tensors, found, len(planned) - tensors, len(recorded) - found, alike


def _is_alike(planned: int, recorded: int) -> bool:
    return planned == recorded or (planned >= _LARGE and 0 <= recorded - planned <= _LARGE)


def _text(row: Comparison) -> str:
    others = f"{row.alike} of {row.others} other blocks are of the {row.workspaces} planned workspaces"
    return f"{row.trace}: {row.found} of {row.tensors} tensors; {others}"


if __name__ == "__main__":
    compare_all(__doc__, JOBS, compare, _text, COUNTS, Comparison)
