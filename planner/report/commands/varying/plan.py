"""The reports of `planner max-batch` and `planner estimate` on samples of varying sizes."""

from collections.abc import Iterator
from typing import Any

from planner.jobs import Batching, BatchShape, Job
from planner.planning import RunRisk, SampledRun, VaryingPlan, VaryingSide
from planner.planning.estimators import Method
from planner.report.assumptions import job_assumptions, unknown_sentence
from planner.report.budget import budget_table, job_to_report
from planner.report.commands.estimates.estimate import plan_seconds_to_json
from planner.report.describe import job_entry, place_text
from planner.report.document import (
    Block,
    Bullets,
    Cell,
    Column,
    Document,
    Entry,
    Headline,
    Lines,
    Style,
    Table,
)
from planner.report.units import (
    NAME_WIDTH,
    attributes,
    mib,
    mib_column,
    mib_text,
    probability_text,
    sides_text,
    timing_line,
    to_builtins,
    with_mib,
)

_SHARES = (0.5, 0.95, 1.0)  # quantiles of the steps' peaks that are reported
_HOW = {
    Batching.PADDED: "samples in random order, padded to the largest of their batch",
    Batching.GROUPED: "samples grouped by size as transformers' group_by_length does, the largest first",
    Batching.TOKENS: "as many samples as stay within the tokens of a batch, padding counted",
    Batching.PACKED: "samples joined to rows of the largest size",
    Batching.SCALED: "one size for all samples of a batch",
}


def varying_document(plan: VaryingPlan, import_seconds: float) -> Document:
    """Return the report of `planner max-batch` or `planner estimate` if the samples vary in size."""
    mine = plan.sides[0]
    sections: list[list[Block]] = [
        [Headline((*verdict(plan), job_entry(plan.job)), style(plan))],
        [budget_table(mine.budget)],
        [sides_table(plan)],
        [] if mine.at is None else [_sampled(mine.at)],
        [Bullets("What changes the answer", tuple(_hints(plan)))],
        [Bullets("Assumed", tuple(_assumptions(plan)))],
        [timing_line(importing=import_seconds, tracing=plan.seconds.trace, replaying=plan.seconds.replay)],
    ]
    return Document.of(*sections)


def style(plan: VaryingPlan) -> Style:
    """Return the verdict's style: "good" if a batch fits, "bad" if none does, "neutral" without a limit."""
    if plan.sides[0].budget.limits.allocator_limit_bytes is None:
        return "neutral"
    return "good" if plan.sides[0].largest else "bad"


def verdict(plan: VaryingPlan) -> Lines:
    """Return lines with the verdict under each allocator configuration, and the risk under the user's."""
    mine, other = plan.sides
    unit = unit_of(plan.job)
    sure = f"over {plan.job.samples.run_steps:,} steps"
    if plan.batch is None:
        lines: Lines = [Entry("Largest batch", largest_text(mine, unit))]
        lines.append(Entry(_name(other), largest_text(other, unit)))
    else:
        lines = [f"{'Batches of' if unit else 'Batch'} {plan.batch:,}{unit}: {_lives(plan, mine)}"]
        lines.append(Entry(_name(other), _lives(plan, other)))
    if mine.at is not None and mine.budget.limits.allocator_limit_bytes is not None:
        risks = [f"{risk_text(mine.at)} at batch {mine.at.batch:,}"]
        if mine.beyond is not None:
            risks.append(f"{risk_text(mine.beyond)} at {mine.beyond.batch:,}")
        lines.append(Entry("Risk", f"P(out of memory) {sure}: {', '.join(risks)}"))
    return lines


def unit_of(job: Job) -> str:
    """Return " tokens" if batches are filled by tokens, else ""."""
    return " tokens" if job.samples.batching is Batching.TOKENS else ""


def largest_text(side: VaryingSide, unit: str) -> str:
    """Return text with the largest batch at the confidence, or with "none" if no batch fits."""
    sure = f"at confidence {side.budget.confidence:g}"
    return f"{side.largest:,}{unit} {sure}" if side.largest else f"none {sure}, not even 1 lives"


def _lives(plan: VaryingPlan, side: VaryingSide) -> str:
    assert side.at is not None
    if side.budget.limits.allocator_limit_bytes is None:
        return f"takes up to {mib_text(side.process_bytes or 0)} MiB of GPU memory"
    failed = [run for run in side.at.runs if run.failed_step is not None]
    if failed:
        first = min(run.failed_step or 0 for run in failed)
        return (
            f"does not live: {len(failed)} of {len(side.at.runs)} sampled runs die, the first at step {first}"
        )
    risk = risk_text(side.at)
    return f"lives at confidence {side.budget.confidence:g}" if side.largest else f"dies with {risk}"


def risk_text(risk: RunRisk) -> str:
    """Return text with the probability that a run is out of memory, and its standard error unless tiny."""
    error = risk.standard_error
    around = "" if not error or error < 0.0005 else f" +- {100 * error:.1f}"
    return f"{probability_text(risk.probability)}{around}"


def _name(side: VaryingSide) -> str:
    return "Expandable segments" if side.expandable_segments else "Without expandable segments"


def sides_table(plan: VaryingPlan) -> Table:
    """Return a table of the sampled runs' memory under each allocator configuration."""
    columns = (
        Column("Sampled runs", min_width=NAME_WIDTH),
        Column("batch", is_number=True),
        mib_column("allocated"),
        mib_column("reserved"),
        mib_column("fragments"),
        mib_column("process"),
        Column("retries a step", is_number=True, rank=1),
    )
    rows: list[tuple[Cell | str, ...]] = []
    for number, side in enumerate(plan.sides):
        at = side.at
        name = "as configured" if number == 0 else _name(side).lower()
        if at is None:
            rows.append((name, "none", "", "", "", "", ""))
            continue
        rows.append(
            (
                name,
                f"{at.batch:,}",
                mib_text(at.peak_allocated_bytes),
                Cell(mib_text(at.peak_reserved_bytes), "strong"),
                mib_text(at.fragmentation_bytes),
                mib_text(side.process_bytes or 0),
                f"{at.retries_per_step:.2f}",
            )
        )
    return Table(columns, rows)


def _sampled(at: RunRisk) -> Table:
    """Return a table of the sampled runs: their steps, sizes, reserved peak and outcome."""
    columns = (
        Column(f"Runs at batch {at.batch:,}", min_width=NAME_WIDTH),
        Column("steps", is_number=True),
        Column("largest drawn", is_number=True),
        Column("dies from", is_number=True),
        mib_column("reserved"),
        Column("end"),
    )
    return Table(columns, [_run_row(number, run) for number, run in enumerate(at.runs)])


def _run_row(number: int, run: SampledRun) -> tuple[str, ...]:
    failure = run.replay.failure
    end = "lives" if failure is None else f"dies in step {run.failed_step}: {place_text(failure)}"
    critical = "never" if run.critical is None else sides_text(run.critical)
    reserved = mib_text(run.replay.peak_reserved_bytes)
    return f"sequence {number}", f"{run.steps:,}", shape_text(run.largest), critical, reserved, end


def shape_text(shape: BatchShape) -> str:
    """Return a batch's number of samples and sample size as text, such as `8x512`."""
    return f"{shape.batch}x{sides_text(shape.size)}"


def _hints(plan: VaryingPlan) -> Iterator[str]:
    mine, other = plan.sides
    if plan.batch is None and other.expandable_segments and other.largest > mine.largest:
        yield (
            f"--alloc-conf expandable_segments:True: batch {other.largest:,} in place of {mine.largest:,}; "
            "segments then grow instead of being cut again for each size"
        )
    if plan.constant:
        whole = sides_text(plan.largest_size)
        yield (
            f"were every batch padded to {whole}, the largest would be {plan.constant:,}: one size leaves "
            "no fragments, and shows in its first step whether it lives"
        )
    if mine.at is not None and plan.job.samples.batching is Batching.PADDED and len(plan.sizes.ranges) == 1:
        yield (
            "--batching grouped pads less and brings the largest batch first; --pad-to 64 gives fewer sizes; "
            "--batching packed has one size; a smaller largest size in --input caps the samples"
        )


def _assumptions(plan: VaryingPlan) -> Iterator[str]:
    yield from sampling_assumptions(plan)
    yield from job_assumptions(plan.job, plan.sides[0].budget)
    yield from plan.notes
    if plan.unknown_ops:
        yield unknown_sentence(plan.unknown_ops)


def sampling_assumptions(plan: VaryingPlan) -> Iterator[str]:
    """Yield sentences on how batches were sampled and replayed."""
    job, sizes = plan.job, plan.sizes
    low, high = sides_text(sizes.smallest), sides_text(sizes.largest)
    file, seed = job.samples.sizes, job.samples.seed
    source = f"counted in {file}" if file else "uniform"
    yield f"sizes of batches from {low} to {high}, samples {source}, drawn with replacement (seed {seed})"
    if sizes.clipped:
        yield f"{sizes.clipped:,} samples of {file} lie outside of --input and are cut or padded to it"
    yield f"batches: {_HOW[job.samples.batching]}" + (
        f", to multiples of {job.samples.pad_to}" if job.samples.pad_to > 1 else ""
    )
    runs = next((side.at.runs for side in plan.sides if side.at is not None), ())
    if runs:
        most = max(run.steps for run in runs)
        yield (
            f"{len(runs)} sequences of up to {most:,} steps were played through one allocator each; the "
            "probability is that of drawing a batch that has no memory in the state which they leave"
        )


def varying_to_json(plan: VaryingPlan, import_seconds: float) -> dict[str, Any]:
    """Return the JSON object of a plan for samples of varying sizes.

    `sides` has the user's allocator configuration first.
    """
    return {
        **job_to_report(plan.job, plan.sides[0].budget),
        "method": Method.TRACE.value,
        "batch": plan.batch,
        "answer_batch": plan.sides[0].largest,
        "risk": plan.risk,
        "run_steps": plan.job.samples.run_steps,
        "sizes": {
            **attributes(plan.sizes, "smallest", "largest", "clipped", "pad_to"),
            "distribution": plan.job.samples.sizes or "uniform",
            "batching": plan.job.samples.batching.value,
        },
        "batch_of_largest_size": plan.constant or None,
        "sides": [side_to_json(side) for side in plan.sides],
        "assumptions": list(_assumptions(plan)),
        **attributes(plan, "unknown_ops"),
        "seconds": plan_seconds_to_json(plan.seconds, import_seconds),
    }


def side_to_json(side: VaryingSide) -> dict[str, Any]:
    return {
        "expandable_segments": side.expandable_segments,
        "largest_batch": side.largest,
        **attributes(side, "process_mib"),
        "at": risk_to_json(side.at),
        "beyond": risk_to_json(side.beyond),
    }


def risk_to_json(risk: RunRisk | None) -> dict[str, Any] | None:
    """Return the JSON object of the risk and peaks of sampled runs, or None if `risk` is None."""
    if risk is None:
        return None
    error = risk.standard_error
    return {
        "batch": risk.batch,
        "p_out_of_memory": round(risk.probability, 5),
        "standard_error": None if error is None else round(error, 5),
        **attributes(risk, "peak_allocated_mib", "peak_reserved_mib", "fragmentation_mib"),
        "retries_per_step": round(risk.retries_per_step, 3),
        "step_peaks_mib": {
            f"{share:g}": mib(size)
            for share, size in zip(_SHARES, risk.step_peaks_bytes(*_SHARES), strict=True)
        },
        "runs": [_run_to_json(run) for run in risk.runs],
    }


def _run_to_json(run: SampledRun) -> dict[str, Any]:
    return {
        "steps": run.steps,
        "failed_step": run.failed_step,
        "failure": with_mib(run.replay.failure),
        "largest_batch": to_builtins(run.largest),
        "critical_size": run.critical,
        "p_out_of_memory": round(run.probability, 5),
        **attributes(run.replay, "peak_allocated_mib", "peak_reserved_mib", "retries"),
        **attributes(run, "reserved_mib"),
    }
