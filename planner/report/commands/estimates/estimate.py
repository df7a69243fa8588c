"""The report of `planner estimate`, and parts that other reports share."""

from collections.abc import Mapping, Sequence
from typing import Any

from planner.allocator import Replay
from planner.hardware import MIB, Likeness, is_fitted, margins_of
from planner.hardware.calibration import Correction
from planner.jobs import Mode
from planner.planning import (
    Answer,
    Estimate,
    HostMemory,
    JobPhase,
    JobPhasePeak,
    RankFigures,
    RetryCost,
    Seconds,
    StepLimit,
    steps_of_epoch,
)
from planner.planning.estimators import Method
from planner.program import LEFT_OUT_NOTE, GrowingSite, Growth, Outcome
from planner.report.assumptions import assumptions, run_assumptions
from planner.report.budget import budget_table, job_to_report
from planner.report.describe import job_entry, place_text
from planner.report.document import (
    Block,
    Bullets,
    Cell,
    Column,
    Document,
    Entry,
    Headline,
    Paragraph,
    Style,
    Table,
)
from planner.report.plots.colours import PART_COLOURS
from planner.report.units import (
    DIGITS,
    NAME_WIDTH,
    attributes,
    breakdown,
    figures_table,
    memory_table,
    mib,
    mib_column,
    mib_parts,
    mib_text,
    probability_text,
    timing_line,
    to_builtins,
    with_mib,
)

STYLES: dict[Outcome, Style] = {
    Outcome.FITS: "good",
    Outcome.FITS_WITH_RETRIES: "warning",
    Outcome.DOES_NOT_FIT: "bad",
}
_UNSURE = (Answer.LIKELY, Answer.NOT_KNOWN)
_NEARLY_ONE = 0.985  # probabilities of at least this get a decimal, as 99 % may be the confidence
_PHASES = {
    JobPhase.LOADING: "loading the model",
    JobPhase.FIRST_STEP: "first step",
    JobPhase.LATER_STEPS: "later steps",
    JobPhase.EVALUATION: "evaluation",
    JobPhase.SAVING: "saving a checkpoint",
    JobPhase.GATHERING: "gathering it to a whole one",
    JobPhase.RESUMING: "resuming from a checkpoint",
}
MAX_STEPS = 5  # the most steps whose retries are listed

Lines = list[str | Entry]


def estimate_document(estimate: Estimate, import_seconds: float) -> Document:
    """Return the report of `planner estimate`."""
    return Document.of(
        [headline(estimate, *exit_entries(estimate), job_entry(estimate.job))],
        [budget_table(estimate.budget)],
        *memory_sections(estimate),
        closing_section(estimate, estimate.seconds, import_seconds),
    )


def headline(estimate: Estimate, *entries: Entry) -> Headline:
    """Return the headline with the verdict on a batch, followed by `entries`.

    It also names the parts of the job that are not planned.
    """
    answer, own = verdict(estimate)
    return Headline((answer, *own, *left_out_entries(estimate), *entries), style_of(estimate))


def left_out_entries(estimate: Estimate | None) -> list[Entry]:
    """Return an entry with the unplanned parts of the job, or [] if there are none."""
    notes = () if estimate is None else estimate.notes
    left_out = [note.removeprefix(LEFT_OUT_NOTE) for note in notes if note.startswith(LEFT_OUT_NOTE)]
    return [Entry("Not planned", "; ".join(left_out))] if left_out else []


def style_of(estimate: Estimate) -> Style:
    """Return the style for the verdict on a batch, such as "good" or "bad"."""
    if estimate.answer is None:
        return "neutral"
    is_warning = estimate.answer in _UNSURE or estimate.step_limit is not None
    return "warning" if is_warning else STYLES[estimate.outcome]


def exit_entries(estimate: Estimate | None) -> list[Entry]:
    """Return an entry that explains exit code 1, or [] if the answer is certain.

    The answer is uncertain if the batch likely fits, or if it is not known whether it fits.
    """
    if estimate is None or estimate.answer not in _UNSURE:
        return []
    return [Entry("Exit code", f"1: it does not fit at confidence {estimate.budget.confidence:g}")]


def verdict(estimate: Estimate) -> tuple[str, tuple[Entry, ...]]:
    """Return the verdict on a batch as (text, entries). The entries are on its failure, retries and risk."""
    batch, process = estimate.run.batch, f"{mib_text(estimate.process_bytes)} MiB"
    if estimate.answer is None:
        return f"Batch {batch} takes {process} of GPU memory", ()
    how = ", with retries" if estimate.retry_costs else ""
    answer = f"{batch_answer(estimate)}{how}{until_text(estimate)}"
    if estimate.is_unlimited:
        answer += unlimited_text(estimate)
    return answer, (*failure_entries(estimate), *retries_entries(estimate), *risk_entries(estimate))


def unlimited_text(estimate: Estimate) -> str:
    """Return a clause on the memory that a batch would take without a limit.

    The allocated bytes are needed on any GPU; further reserved bytes may be released under a memory limit.
    """
    process, allocated = mib_text(estimate.process_bytes), mib_text(estimate.run.peak_allocated_bytes)
    return f"; without a limit it would take {process} MiB, {allocated} of them allocated at once"


def batch_answer(estimate: Estimate) -> str:
    """Return the sentence on whether a batch fits: yes, likely, unknown or no."""
    batch = estimate.run.batch
    if estimate.answer is Answer.DOES_NOT_FIT:
        return f"Batch {batch} does not fit"
    if estimate.answer is Answer.NOT_KNOWN:
        return f"It is not known whether batch {batch} fits"
    if estimate.answer is Answer.LIKELY:
        return f"Batch {batch} likely fits ({likely_text(estimate.p_out_of_memory)})"
    return f"Batch {batch} fits at confidence {estimate.budget.confidence:g}"


def likely_text(p_out_of_memory: float | None) -> str:
    """Return the probability that a batch fits, as text."""
    share = 1 - (p_out_of_memory or 0)
    return f"{share:.0%}".replace("%", " %") if share < _NEARLY_ONE else probability_text(share)


def until_text(estimate: Estimate) -> str:
    """Return a clause on the last step that fits, or "" if all steps fit.

    Steps stop fitting if memory grows with every step.
    """
    limit = estimate.step_limit
    if limit is None:
        return ""
    steps, until = steps_of_epoch(estimate.job, estimate.run.batch), f"step {limit.steps:,}"
    of_epoch = f" of {steps:,} in an epoch" if steps else ""
    about = "" if limit.is_exact else "about "
    if estimate.outcome is Outcome.DOES_NOT_FIT:
        return f": memory grows with every step, and lasts until {about}{until}{of_epoch}"
    return f", until {about}{until}{of_epoch}: memory grows with every step"


def retries_entries(estimate: Estimate) -> list[Entry]:
    """Return an entry with the cost of allocator retries, or [] if there are none.

    If none are expected, it has the retries in the least memory at the confidence.
    """
    if estimate.retry_costs:
        return [Entry("Retries", retries_text(estimate.retry_costs))]
    costs = estimate.retry_costs_at_confidence
    if not costs:
        return []
    return [Entry("Retries", f"none expected; {scarce_text(estimate)}, {retries_text(costs)}")]


def scarce_text(estimate: Estimate) -> str:
    """Return the phrase "in the least memory at confidence C"."""
    return f"in the least memory at confidence {estimate.budget.confidence:g}"


def retries_text(costs: Sequence[RetryCost]) -> str:
    """Return the cost of retries in the traced steps, as text."""
    counts = [str(cost.retries) for cost in costs]
    if len(counts) > MAX_STEPS:
        counts = [*counts[:MAX_STEPS], "..."]
    each = ", ".join(counts[:-1]) + (" and " if len(counts) > 1 else "") + counts[-1]
    frees = sum(cost.cuda_frees for cost in costs)
    steps = f"the {len(costs)} steps" if len(costs) > 1 else "the step"
    return (
        f"{each} in {steps} traced; torch then releases what it has cached (calls of cudaFree in all: "
        f"{frees}; the GPU stands still meanwhile) and asks CUDA again"
    )


def risk_entries(*estimates: Estimate) -> list[Entry]:
    """Return an entry with each batch's probability of running out of memory.

    If it is unknown, the entry has the reason. Returns [] if there is neither a probability nor a reason,
    such as in unlimited memory.
    """
    probabilities = dict.fromkeys(
        f"{probability_text(estimate.p_out_of_memory)} at batch {estimate.run.batch}{_steps_text(estimate)}"
        for estimate in estimates
        if estimate.p_out_of_memory is not None
    )
    if probabilities:
        return [Entry("Risk", f"P(out of memory) {', '.join(probabilities)}")]
    if not estimates:
        return []
    budget = estimates[0].budget
    unlike = budget.likeness.unlike
    if budget.limits.allocator_limit_bytes is None or not unlike or is_fitted(budget):
        return []
    return [Entry("Risk", f"not known: no run that is known {' or '.join(unlike)}")]


def _steps_text(estimate: Estimate) -> str:
    """Return " in N steps" if growing memory limits the steps, else ""."""
    if estimate.growth is None or estimate.step_limit is None or estimate.outcome is Outcome.DOES_NOT_FIT:
        return ""
    return f" in {estimate.growth.steps} steps"


def failure_entries(estimate: Estimate) -> list[Entry]:
    """Return an entry on the request that fails, or [] if none fails. It has the request's place and size."""
    if estimate.failed is None or estimate.failed.failure is None:
        return []
    failure = estimate.failed.failure
    requested = failure.requested_bytes
    size = f"{mib_text(requested)} MiB" if requested >= MIB else f"{requested:,} bytes"
    text, more = f"{place_text(failure)}: no room for {size}", estimate.failed_bytes
    if more is not None and more != estimate.budget.limits.allocator_limit_bytes:
        text += f" where the allocator has {mib_text(more)} MiB, which is as probable"
    elif estimate.answer in _UNSURE and more is not None:
        text += f" {scarce_text(estimate)}"
    return [Entry("Fails at", text)]


# ---- tables


def memory_sections(estimate: Estimate) -> list[list[Block]]:
    """Return the sections on the memory of an estimate.

    They are the batch, the job's phases, the parts of the process and, if there are several, the ranks.
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
    """Return a table of a batch's allocated, reserved and process peaks.

    It has the pinned host memory too, if there is any.
    """
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
    """Return a phrase that names what the process's memory consists of.

    It is the reserved memory, the CUDA context and, on several GPUs, NCCL.
    """
    return (
        "reserved and CUDA context"
        if estimate.budget.device.nccl is None
        else "reserved, CUDA context and NCCL"
    )


def _phases_section(estimate: Estimate) -> list[Block]:
    """Return the section with a table of the peaks in each phase of the job.

    Paragraphs on unplanned phases and on host memory follow.
    """
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
    """Return a table of the parts of a process, with a bar for each share."""
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
    """Return the last section of a report, with assumptions and the time taken.

    The assumptions are left out if `estimate` is None.
    """
    timing = timing_line(importing=import_seconds, tracing=seconds.trace, replaying=seconds.replay)
    return [timing] if estimate is None else [Bullets("Assumed", run_assumptions(estimate)), timing]


# ---- JSON


def estimate_to_json(estimate: Estimate, import_seconds: float) -> dict[str, Any]:
    """Return the JSON object of `planner estimate`.

    If the batch does not fit at the confidence, `failure` describes the failing request. If the batch is not
    expected to fit, the peaks are for a GPU with unlimited memory. MiB are rounded to 0.001, and the
    breakdown adds up to `process_mib`.
    """
    run, failed = estimate.run, estimate.failed
    return {
        **job_to_report(estimate.job, estimate.budget),
        "batch": run.batch,
        "method": Method.TRACE.value,
        **attributes(run, "peak_allocated_mib", "peak_reserved_mib", "end_allocated_mib"),
        **_steps(run),
        "phases": [_phase(peak) for peak in estimate.phases],
        **attributes(estimate, "process_mib", "process_upper_mib"),
        "pinned_host_mib": mib(estimate.host.pinned_bytes),
        "host": with_mib(estimate.host),
        "fits": estimate.outcome.value,
        "answer": None if estimate.answer is None else estimate.answer.value,
        "fits_until_step": None if estimate.step_limit is None else estimate.step_limit.steps,
        "p_out_of_memory": None if estimate.p_out_of_memory is None else round(estimate.p_out_of_memory, 5),
        "risk": _risk(estimate.budget.likeness),
        "retries": (failed or run).retries if estimate.answer is Answer.DOES_NOT_FIT else run.retries,
        "ranks": [_rank(row) for row in estimate.ranks],
        "retry_costs": to_builtins(estimate.retry_costs),
        "retry_costs_at_confidence": to_builtins(estimate.retry_costs_at_confidence),
        "failure": with_mib(failed and failed.failure),
        "breakdown_mib": mib_parts(breakdown(estimate)),
        "calibration": _calibration(estimate.budget.correction),
        "growth": _growth(estimate.growth, estimate.step_limit),
        "assumptions": list(assumptions(estimate)),
        **attributes(estimate, "unknown_ops"),
        "seconds": plan_seconds_to_json(estimate.seconds, import_seconds),
    }


def plan_seconds_to_json(seconds: Seconds, import_seconds: float) -> dict[str, float]:
    """Return the JSON value of `seconds`: the times of importing, tracing and replaying."""
    spent = {"import": import_seconds, "trace": seconds.trace, "replay": seconds.replay}
    return {name: round(value, 3) for name, value in spent.items()}


def _rank(row: RankFigures) -> dict[str, Any]:
    """Return the JSON value of a group of ranks with equal memory."""
    figures = attributes(row, "peak_allocated_mib", "peak_reserved_mib", "process_mib")
    return {"ranks": list(row.ranks), "fits": row.outcome.value, **figures}


def _risk(likeness: Likeness) -> dict[str, Any]:
    """Return the JSON value of `risk`, the basis of the margins if nothing is calibrated."""
    margins = margins_of(likeness)
    own = margins.residuals
    return {
        "kind": likeness.kind.value,
        "runs": own.runs,
        "outcomes": own.verdicts.outcomes,
        "peaks": own.peaks,
        "location": round(margins.verdicts.location, 5),
        "scale": round(margins.verdicts.scale, 5),
        "departures": [departure.what for departure in likeness.departures],
        **attributes(likeness, "unlike", "lengths"),
        "parts": [
            {"what": part.what, "scale": part.scale, "rests_on": part.rests_on} for part in margins.parts
        ],
    }


def _steps(run: Replay) -> dict[str, float | None]:
    """Return the JSON keys with the peaks of the first step and of later steps.

    Peaks of steps that were not traced are null.
    """
    peaks: dict[str, float | None] = {}
    for name in ("first_step", "later_steps"):
        step = attributes(getattr(run, name), "allocated_mib", "reserved_mib")
        peaks[f"peak_{name}_mib"], peaks[f"peak_reserved_{name}_mib"] = step.values()
    return peaks


def _phase(peak: JobPhasePeak) -> dict[str, Any]:
    """Return the JSON value of a phase's peaks."""
    figures = attributes(peak, "allocated_mib", "reserved_mib")
    peaks = {f"peak_{name}": figure for name, figure in figures.items()}
    return {"name": peak.phase.value, **peaks, "covered": peak.is_planned}


def _calibration(correction: Correction | None) -> dict[str, Any] | None:
    """Return the JSON value of `calibration`, or None without a calibration.

    If only the context is calibrated, the fit's sizes and slope are null, `points` is 0 and `outliers` [].
    """
    if correction is None:
        return None
    fit = correction.fit
    return {
        "which": correction.about,
        **attributes(correction, "level", "source", "includes_context"),
        "drift_mib": mib(correction.extra_spread_bytes),
        **attributes(fit, "overhead_mib", "spread_mib", "slope"),
        "points": 0 if fit is None else fit.points,
        "outliers": [] if fit is None else list(fit.outliers),
    }


def _growth(growth: Growth | None, limit: StepLimit | None) -> dict[str, Any] | None:
    """Return the JSON value of `growth` for an estimate, or None if memory does not grow."""
    if growth is None:
        return None
    return {
        **attributes(growth, "bytes_per_step", "steps", "last_step"),
        "steps_that_fit": None if limit is None else limit.steps,
        **attributes(limit, "is_exact"),
        "garbage": growth.is_garbage,
        "sites": [_site(site) for site in growth.sites],
    }


def _site(one: GrowingSite) -> dict[str, Any]:
    source = one.source
    return {
        **attributes(one.site, "module", "op"),
        "bytes_per_step": one.bytes_per_step,
        "source": None if source is None else source.source or None,
        "code": None if source is None else source.code or None,
        "garbage": None if source is None else source.is_garbage,
    }
