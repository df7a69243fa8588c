"""The tables of an estimate: a batch's peaks, the job's phases, the parts of the process, and ranks."""

from collections.abc import Mapping, Sequence

from planner.jobs import Mode
from planner.planning import (
    Estimate,
    HostMemory,
    JobPhase,
    RankFigures,
    Seconds,
)
from planner.report.assumptions import run_assumptions
from planner.report.document import (
    Block,
    Bullets,
    Cell,
    Column,
    Paragraph,
    Table,
)
from planner.report.plots.colours import PART_COLOURS
from planner.report.units import (
    DIGITS,
    NAME_WIDTH,
    breakdown,
    figures_table,
    memory_table,
    mib_column,
    mib_parts,
    mib_text,
    timing_line,
)

_PHASES = {
    JobPhase.LOADING: "loading the model",
    JobPhase.FIRST_STEP: "first step",
    JobPhase.LATER_STEPS: "later steps",
    JobPhase.EVALUATION: "evaluation",
    JobPhase.SAVING: "saving a checkpoint",
    JobPhase.GATHERING: "gathering it to a whole one",
    JobPhase.RESUMING: "resuming from a checkpoint",
}


def memory_sections(estimate: Estimate) -> list[list[Block]]:
    """Return the sections on a batch's peaks, the job's phases, the process's parts and the ranks.

    There is no section on ranks if all planned ranks are alike.
    """
    own: list[list[Block]] = [
        [batch_table(estimate)],
        _phases_section(estimate),
        [parts_table(breakdown(estimate))],
    ]
    return [*own, [_ranks_table(estimate.ranks)]] if len(estimate.ranks) > 1 else own


def _ranks_table(rows: Sequence[RankFigures]) -> Table:
    """Return a table of the ranks' memory, with a row for each group of equal ranks."""
    sizes = (
        (ranks_text(row.ranks), (row.peak_allocated_bytes, row.peak_reserved_bytes, row.process_bytes))
        for row in rows
    )
    return figures_table("Rank", ("allocated", "reserved", "process MiB"), sizes)


def ranks_text(ranks: Sequence[int]) -> str:
    """Return the numbers of ranks as text, with ranges such as `0-3`."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def batch_table(estimate: Estimate) -> Table:
    """Return a table of a batch's allocated, reserved and process peaks, and of pinned memory if any."""
    run, confidence = estimate.run, estimate.budget.confidence
    rows = [
        ("peak allocated", run.peak_allocated_bytes, "tensors and workspaces, as torch counts them"),
        ("peak reserved", run.peak_reserved_bytes, "what torch's caching allocator holds"),
        ("process", estimate.process_bytes, _outside(estimate) + ", as nvidia-smi shows it"),
    ]
    if not estimate.is_unlimited:
        rows.append(("process, at most", estimate.process_upper_bytes, f"at confidence {confidence:g}"))
    if estimate.host.pinned_bytes:
        rows.append(
            ("pinned, of the host", estimate.host.pinned_bytes, "each block a power of two, as torch pins")
        )
    how = ", no limit" if estimate.is_unlimited else ", with retries" if estimate.retry_costs else ""
    return memory_table(f"Batch {run.batch}{how}", rows)


def _outside(estimate: Estimate) -> str:
    """Return the phrase "reserved and CUDA context", with NCCL if its memory is counted."""
    return (
        "reserved and CUDA context"
        if estimate.budget.device.nccl is None
        else "reserved, CUDA context and NCCL"
    )


def _phases_section(estimate: Estimate) -> list[Block]:
    """Return a table of each job phase's peaks, and paragraphs on unplanned phases and host memory."""
    rows = (
        (_PHASES[peak.phase], (peak.allocated_bytes, peak.reserved_bytes))
        for peak in estimate.phases
        if peak.allocated_bytes is not None and peak.reserved_bytes is not None
    )
    section: list[Block] = [figures_table("Phase", ("allocated", "reserved MiB"), rows)]
    others = {peak.phase: _PHASES[peak.phase] for peak in estimate.phases if not peak.is_planned}
    if JobPhase.EVALUATION in others and estimate.job.loop.mode is not Mode.STEP:
        others[JobPhase.EVALUATION] += " (--evaluate adds one)"
    if others:
        section.append(Paragraph(f"Phases not planned: {', '.join(others.values())}", "faint"))
    return [*section, Paragraph(_host_text(estimate.host), "faint")]


def _host_text(host: HostMemory) -> str:
    """Return a sentence on the host memory of a process. Pinned memory is in `batch_table`."""
    sizes = {
        "weights until they are on the GPU": host.weights_bytes,
        "each batch that a loader holds": host.batch_bytes,
        "a checkpoint that is loaded to the CPU": host.checkpoint_bytes,
    }
    known = [f"{mib_text(size)} MiB for {what}" for what, size in sizes.items() if size is not None]
    unknown = [what for what, size in sizes.items() if size is None] if host.weights_bytes is None else []
    others = [*unknown, "Python", "libraries", "data"]
    return f"Host memory: {', '.join(known)}; not counted: {', '.join(others)}"


def parts_table(parts: Mapping[str, int]) -> Table:
    """Return a table of the parts of a process that are not 0 bytes, with a bar for each share."""
    columns = (
        Column("The process consists of", min_width=NAME_WIDTH),
        mib_column(),
        Column("share", is_number=True, min_width=6),
        Column(rank=1, is_bar=True),
    )
    rounded, total = mib_parts(parts, DIGITS), sum(parts.values())
    shares = {name: size_bytes / total for name, size_bytes in parts.items() if size_bytes}
    rows = [
        (name, f"{rounded[name]:,.1f}", f"{share:.1%}", Cell("", colour=PART_COLOURS[name], share=share))
        for name, share in shares.items()
    ]
    return Table(columns, rows)


def closing_section(estimate: Estimate | None, seconds: Seconds, import_seconds: float) -> list[Block]:
    """Return the last section of a report: the assumptions, unless `estimate` is None, and the time taken."""
    timing = timing_line(importing=import_seconds, tracing=seconds.trace, replaying=seconds.replay)
    return [timing] if estimate is None else [Bullets("Assumed", run_assumptions(estimate)), timing]
