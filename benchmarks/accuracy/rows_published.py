"""Rows of the accuracy report from the published runs: xMem's artifact and timm's mixed-precision brackets.

`benchmarks/published/README.md` names origins and loops.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from benchmarks.accuracy.ablations import SCRATCH_TERMS, peaks, variants, verdicts
from benchmarks.accuracy.rows import DIES, LIVES, PUBLISHED, Row, texts
from benchmarks.published import timm_brackets
from benchmarks.published.outcomes import MIB, RUNS, job_of as cnn_job, set_up_bytes
from benchmarks.published.transformers import job_of as transformer_job
from benchmarks.rows import read_lines
from planner.capture.session import record
from planner.errors import PlannerError
from planner.hardware.cudnn import PublishedWorkspaces
from planner.hardware.database import find_device
from planner.hardware.likeness import kind_of
from planner.jobs import Job

CNNS, TRANSFORMERS, CAPS, CARD, TIMM = (
    "xMem's CNNs", "xMem's transformers", "under allocator caps", "on the whole card", "timm's brackets"
)  # fmt: skip
NEED_STEP_MIB = 4  # of timm's; each step takes a replay
Peers = Callable[[Job, int], dict[str, float]]  # other estimators' figures, in MiB
Line = dict[str, str]


@dataclass(frozen=True, slots=True)
class Published:
    """One line of a published table, as a task for a worker."""

    kind: str  # CNNS, TRANSFORMERS or TIMM
    number: int  # its place in the file: runs of one job need different names
    line: Line


def xmem_tasks(kind: str) -> list[Published]:
    """Return the runs of CNNs or of transformers."""
    library = "torchvision" if kind == CNNS else "transformers"
    lines = list(enumerate(read_lines(RUNS), start=2))
    return [Published(kind, number, line) for number, line in lines if line["library"] == library]


def timm_tasks() -> list[Published]:
    """Return all brackets."""
    return [
        Published(TIMM, number, line)
        for number, line in enumerate(read_lines(timm_brackets.BRACKETS), start=2)
    ]


def xmem_rows(task: Published, peers: Peers) -> list[Row]:
    """Return the process's peak, the outcomes under caps, and that on the whole card, of one run.

    The peak is the rise over a first sample which, of CNNs, holds model and optimizer
    (`benchmarks/published/outcomes.py` shows it); that memory is subtracted from all estimators' figures.
    """
    run, is_cnn = task.line, task.kind == CNNS
    job = cnn_job(run) if is_cnn else _completed(transformer_job(run))
    batch = int(run["batch"])
    chip = find_device(run["gpu"]).target
    with nullcontext() if is_cnn else _transformers_4_51():
        trace = record(
            job, batch, chip.capability, sm_count=chip.sm_count, conv_workspace_query=PublishedWorkspaces()
        )
    by_term = variants(trace, batch)
    needed = by_term["planner"].needed_mib(batch)
    name = run["model"].split("(")[0]
    campaign = run["campaign"][:1] or "-"
    case = f"{name} {run['optimizer']} {batch} ({run['gpu'][:8]}, {campaign}, line {task.number})"
    family = "cnn" if is_cnn else "transformer"
    kind = kind_of(job, trace).value

    def row(
        source: str, layer: str, truth: str, estimates: dict[str, str], at: str = "", **more: float
    ) -> Row:
        return Row(
            source, layer, name, case + at, family, run["gpu"], batch, truth, estimates, kind=kind, **more
        )  # type: ignore[arg-type]

    died = run["oom_on_full_gpu"] == "True"
    rows = []
    if run["peak_nvml_delta_mib"] and not died:
        before = set_up_bytes(trace, batch) / MIB if is_cnn else 0.0
        sizes = peaks(by_term) | peers(job, batch)
        estimates = {estimator: size - before for estimator, size in sizes.items()}
        if is_cnn:
            estimates["no_set_up"] = sizes["planner"]
        published = {who: text for who in PUBLISHED if (text := run[f"{who}_estimate_mib"])}
        rows.append(row(task.kind, "D", run["peak_nvml_delta_mib"], texts(estimates) | published))
    for cap, outcome in re.findall(r"(\d+):(OOM|fits)", run["allocator_cap_tests"]):
        limit = float(cap)
        truth = DIES if outcome == "OOM" else LIVES
        at = (
            f" under {cap}"
            if not any(r.case.endswith(f" under {cap}") for r in rows)
            else f" under {cap}, again"
        )
        judged = verdicts(by_term, batch, limit)
        rows.append(row(CAPS, "E", truth, judged, at, limit_mib=limit, needed_mib=needed))
    if died or run["peak_nvml_delta_mib"]:
        device = find_device(run["gpu"])
        left = float(run["gpu_torch_total_mib"]) - device.context.value / MIB
        judged = verdicts(by_term, batch, left)
        rows.append(row(CARD, "E", DIES if died else LIVES, judged, "", limit_mib=left, needed_mib=needed))
    return rows


def timm_rows(task: Published, peers: Peers) -> list[Row]:
    """Return the batch that trained and the next candidate, which did not, within the allocator's memory
    as in timm_brackets.py.
    """
    bracket = task.line
    job = timm_brackets.job_of(bracket)
    limit = float(timm_brackets.TOTAL_MIB - timm_brackets.OUTSIDE_MIB)
    rows = []
    for column, truth in (("fitted_batch", LIVES), ("next_larger_candidate_that_oomed", DIES)):
        batch = int(bracket[column])
        case = f"{bracket['model']} {bracket['memory_format']} {batch}"
        kind = ""
        try:
            trace = record(job, batch, timm_brackets.AMPERE)
            by_term = variants(trace, batch)
            kind = kind_of(job, trace).value
        except PlannerError as error:
            estimates: dict[str, str] = dict.fromkeys(("planner", *SCRATCH_TERMS), "no trace")
            needed, note = None, str(error)
        else:
            estimates, note = verdicts(by_term, batch, limit), ""
            needed = by_term["planner"].needed_mib(batch, NEED_STEP_MIB)
        rows.append(
            Row(
                TIMM,
                "E",
                bracket["model"],
                case,
                bracket["module_now"],
                "RTX 3090 24GB",
                batch,
                truth,
                estimates,
                limit,
                needed,
                note,
                kind,
            )  # fmt: skip
        )
    return rows


def _completed(job: Job) -> Job:
    from planner.capture.models.registry import complete_by_library

    return complete_by_library(job)


def _transformers_4_51() -> AbstractContextManager[None]:
    from benchmarks.published.shims.transformers_4_51 import as_transformers_4_51

    return as_transformers_4_51()


def pairs(rows: list[Row]) -> Iterator[tuple[Row, Row]]:
    """Yield the two rows of each of timm's brackets."""
    brackets = [row for row in rows if row.source == TIMM]
    yield from zip(brackets[::2], brackets[1::2], strict=True)
