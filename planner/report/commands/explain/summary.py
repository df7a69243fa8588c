"""Summarize a planned batch for the HTML page and the pictures.

`commands.run` summarizes an emulated run.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from planner.jobs import job_to_json
from planner.planning import Estimate, Explanation
from planner.program import Outcome
from planner.report.assumptions import assumptions
from planner.report.commands.estimates.verdict import verdict
from planner.report.commands.explain.workspaces import certainty
from planner.report.describe import describe_job, describe_loop
from planner.report.document import Entry
from planner.report.units import breakdown, is_endless, mib_text


@dataclass(frozen=True, slots=True)
class Summary:
    """Texts and numbers that the page and the pictures show about an explained run."""

    name: str  # name of the model or the script
    title: str
    caption: str  # caption of a picture
    about: str  # the job or command, in one line
    outcome: Outcome | None  # None if nothing limits the memory
    answer: str
    entries: tuple[Entry, ...]  # added to the answer, such as where memory runs out
    tiles: tuple[tuple[str, str], ...]  # name and figure of each tile of the page
    parts: Mapping[str, int]  # bytes of the process, by category
    certainty: str  # how certain the sizes of workspaces are; empty if no workspaces are listed
    assumptions: tuple[str, ...]
    data: Mapping[str, Any]  # the run's keys in the page's JSON

    @property
    def process_bytes(self) -> int:
        """Return the process's memory in bytes, the sum of `parts`."""
        return sum(self.parts.values())


def summary_of(estimate: Estimate, explanation: Explanation) -> Summary:
    """Return the `Summary` of a planned batch, for the page and the picture."""
    job, device = estimate.job, estimate.budget.device
    answer, entries = verdict(estimate)
    on = "" if is_endless(device.usable) else f" on {device.name}"
    batch = estimate.run.batch
    return Summary(
        name=job.model.name,
        title=f"{job.model.name}, batch {batch}{on}",
        caption=f"{job.model.name}, batch {explanation.run.batch}: {describe_loop(job)}",
        about=describe_job(job),
        outcome=estimate.outcome if estimate.budget.limits.allocator_limit_bytes is not None else None,
        answer=answer,
        entries=entries,
        tiles=tuple(_tiles(estimate)),
        parts=breakdown(estimate),
        certainty=certainty(estimate, explanation),
        assumptions=assumptions(estimate),
        data={"model": job.model.name, "batch": explanation.run.batch, "job": job_to_json(job)},
    )


def _tiles(estimate: Estimate) -> Iterator[tuple[str, str]]:
    run, device = estimate.run, estimate.budget.device
    yield "process, as nvidia-smi shows it", tile_text(estimate.process_bytes)
    if not estimate.is_unlimited:
        yield f"at most ({estimate.budget.confidence:g} sure)", tile_text(estimate.process_upper_bytes)
    yield "peak reserved", tile_text(run.peak_reserved_bytes)
    yield "peak allocated", tile_text(run.peak_allocated_bytes)
    if not is_endless(device.usable):
        yield "headroom", tile_text(device.usable.value - estimate.process_bytes)


def tile_text(size_bytes: int) -> str:
    """Return a size as text in MiB with its unit."""
    return f"{mib_text(size_bytes)} MiB"
