"""What pages and pictures of an explanation say of its run: of a plan here, of a command in `run_summary`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from planner.jobs import job_to_json
from planner.planning import Estimate, Explanation
from planner.program import Outcome
from planner.report.assumptions import assumptions
from planner.report.commands.explain_workspaces import sureness
from planner.report.commands.max_batch import verdict
from planner.report.layout import DIGITS, doing, job_text
from planner.report.units import breakdown, is_endless, mib


@dataclass(frozen=True, slots=True)
class Summary:
    """The run of an explanation, in words and figures."""

    name: str  # of the model or the script
    title: str
    caption: str  # of a picture
    about: str  # what is run, in one line
    outcome: Outcome | None  # None where nothing bounds the memory
    verdict: str
    failure: str  # where memory runs out; "" where it does not
    tiles: tuple[tuple[str, str], ...]  # name, figure
    parts: Mapping[str, int]  # of the process, by category
    sureness: str  # of workspaces; "" where none are listed
    assumptions: tuple[str, ...]
    data: Mapping[str, Any]  # its keys in the page's JSON

    @property
    def process_bytes(self) -> int:
        """Return the size of the process."""
        return sum(self.parts.values())


def summary_of(estimate: Estimate, explanation: Explanation) -> Summary:
    """Return the summary of a planned batch."""
    job, device = estimate.job, estimate.budget.device
    answer, *fails = verdict(estimate)
    on = "" if is_endless(device.usable) else f" on {device.name}"
    batch = estimate.run.batch
    return Summary(
        name=job.model,
        title=f"{job.model}, batch {batch}{on}",
        caption=f"{job.model}, batch {explanation.run.batch}: {doing(job)}",
        about=job_text(job),
        outcome=estimate.outcome if estimate.budget.arena.share_bytes is not None else None,
        verdict=answer,
        failure=" ".join(" ".join(fails).split()),
        tiles=tuple(_tiles(estimate)),
        parts=breakdown(estimate),
        sureness=sureness(estimate, explanation),
        assumptions=assumptions(estimate),
        data={"model": job.model, "batch": explanation.run.batch, "job": job_to_json(job)},
    )


def _tiles(estimate: Estimate) -> Iterator[tuple[str, str]]:
    run, device = estimate.run, estimate.budget.device
    yield "process, as nvidia-smi shows it", mib_text(estimate.process_bytes)
    if estimate.failed is None:
        yield f"at most ({estimate.budget.confidence:g} sure)", mib_text(estimate.process_upper_bytes)
    yield "peak reserved", mib_text(run.peak_reserved_bytes)
    yield "peak allocated", mib_text(run.peak_allocated_bytes)
    if not is_endless(device.usable):
        yield "headroom", mib_text(device.usable.value - estimate.process_bytes)


def mib_text(size_bytes: int) -> str:
    """Return bytes as a figure with its unit."""
    return f"{mib(size_bytes, DIGITS):,.1f} MiB"
