"""The reports of `planner run` and `planner max-batch -- COMMAND`, which run commands on emulated GPUs."""

import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from planner.emulator import EmulatedRun, GpuPeaks, GpuRecord, OutOfMemory, SharedGpu, program_name
from planner.planning import DisplayLimits
from planner.planning.command import CommandPlan, ExplainedRun
from planner.program import LARGEST_BATCH, Outcome
from planner.report.commands.estimates.verdict import STYLES
from planner.report.commands.explain.report import breakdown_sections, breakdown_to_json
from planner.report.commands.explain.summary import Summary, tile_text
from planner.report.commands.explain.tables import peak_text
from planner.report.commands.max_batch import search_to_json
from planner.report.document import Block, Bullets, Document, Entry, Headline, Paragraph, Table
from planner.report.units import SCHEMA, attributes, figures_table, mib, mib_text, with_mib

MAX_STEPS = 12  # the most rows of the table of optimizer steps
_PHASES = {  # texts for the phase in which memory ran out
    "backward": "backward pass",
    "optimizer": "optimizer's step",
    "loading": "before any module ran",
    "between steps": "between two steps",
    "evaluation": "in an evaluation",
}
_FITS = {
    Outcome.FITS: "yes",
    Outcome.FITS_WITH_RETRIES: "yes, with retries: cached memory was released to make room",
    Outcome.DOES_NOT_FIT: "no: out of memory",
}
_CAUGHT = "but the script met an out-of-memory error, and caught it"
_VERDICTS = {
    Outcome.FITS: "The command fits",
    Outcome.FITS_WITH_RETRIES: "The command fits with retries: cached memory was released to make room",
    Outcome.DOES_NOT_FIT: "The command runs out of memory",
}


def run_document(run: EmulatedRun, explained: ExplainedRun | None = None) -> Document:
    """Return the report of `planner run`. It has a breakdown of the peak if the run was explained."""
    largest = run.largest
    stopped = f"; stopped after {largest.step_count} optimizer steps" if largest.was_stopped else ""
    ran = _what_ran(run, f"; exit code {run.exit_code}{stopped}")
    lines = (Entry("Fits", _fits(run)), *_failure_entries(run), *_crash_entries(run), *ran)
    notes = () if explained is None else explained.notes
    breakdown: list[list[Block]] = []
    if explained is not None:
        breakdown = breakdown_sections(explained.parts, explained.explanation, DisplayLimits())
        breakdown.insert(0, [Entry("Peak allocated", peak_text(explained.explanation))])
    return Document.of(
        [Headline(lines, STYLES[run.outcome])],
        _peaks(run),
        _steps(largest),
        *breakdown,
        [*_closing(run, *notes), Paragraph(f"Took {run.seconds:.1f} s", "faint")],
    )


def _what_ran(of: EmulatedRun | CommandPlan, ended: str = "") -> tuple[Entry, Entry]:
    gpu = f"{f'{of.gpu_count} x ' if of.gpu_count > 1 else ''}{of.gpu} (emulated)"
    return Entry("GPU", gpu), Entry("Command", f"{shlex.join(of.command)}{ended}")


def _fits(run: EmulatedRun) -> str:
    return _FITS[run.outcome] if run.caught is None else f"yes, {_CAUGHT}"


def _failure_entries(run: EmulatedRun) -> tuple[Entry, ...]:
    """Return an entry on where memory ran out, or () if no error told the script so."""
    failure = run.failure or run.caught
    if failure is None:
        return ()
    parts = [
        f"before optimizer step {failure.step} ended",
        _PHASES.get(failure.phase, ""),
        f"module {failure.module}" if failure.module else "",
        failure.line,
        f"no room for {mib_text(failure.requested_bytes)} MiB",
        *(f"next to {mib_text(one.process_bytes)} MiB of rank {one.rank}" for one in failure.others),
    ]
    return (Entry("Fails" if run.caught is None else "Caught", ", ".join(part for part in parts if part)),)


def _crash_entries(run: EmulatedRun) -> tuple[Entry, ...]:
    """Return an entry on a crash after the script ended, or () without a crash."""
    if not run.crash:
        return ()
    text = f"{run.crash}, after the script had ended and its record was whole: not for want of GPU memory"
    return (Entry("Died at exit", text),)


def versions_text(record: GpuRecord) -> str:
    """Return the versions of torch and its libraries as text."""
    return ", ".join(f"{name} {version}" for name, version in record.versions)


def _table(title: str, rows: Iterable[tuple[str, GpuPeaks]]) -> Table:
    sizes = ((name, (one.allocated_bytes, one.reserved_bytes, one.process_bytes)) for name, one in rows)
    return figures_table(title, ("allocated", "reserved", "nvidia-smi MiB"), sizes)


def _peaks(run: EmulatedRun) -> list[Block]:
    """Return a table of the peaks of each process on each GPU, and a line for each shared GPU."""
    several = len(run.records) > 1
    names = [f"rank {one.rank}, GPU {one.gpu_index}" if several else "whole run" for one in run.records]
    table = _table("Peak", [(name, record.peak) for name, record in zip(names, run.records, strict=True)])
    shared = (
        f"{_named(one.ranks)} share GPU {one.index}: {mib_text(one.process_bytes)} MiB at the same time"
        f"{_strays(run, one)}"
        for one in run.shared_gpus
    )
    return [table, *map(Paragraph, shared)]


def _strays(run: EmulatedRun, shared: SharedGpu) -> str:
    """Return a hint on processes that use both a shared GPU and another GPU, or "".

    Returns "" if none or all of the shared GPU's processes do so.
    """
    elsewhere = {(one.rank, one.pid) for one in run.records if one.gpu_index != shared.index}
    here = (one for one in run.records if one.gpu_index == shared.index)
    strays = [one for one in here if (one.rank, one.pid) in elsewhere]
    if not strays or len(strays) == len(shared.ranks):
        return ""
    ranks = [one.rank for one in strays]
    who = f"rank {ranks[0]} also has" if len(ranks) == 1 else f"{_named(ranks)} also have"
    lines = ", ".join(dict.fromkeys(one.first_line for one in strays if one.first_line))
    since = f", and on this one since {lines}" if lines else ""
    return (
        f"; {who} memory on another GPU{since}: look for torch.load without map_location, and for "
        '"cuda" without a number before torch.cuda.set_device'
    )


def _named(ranks: Sequence[int]) -> str:
    are_told_apart = len(set(ranks)) == len(ranks)  # true if a launcher sets RANK
    return f"ranks {_listed(ranks)}" if are_told_apart else f"{len(ranks)} processes"


def _steps(record: GpuRecord) -> list[Block]:
    rows = [
        (f"{step.first}" if step.first == step.last else f"{step.first} to {step.last}", step.peaks)
        for step in record.steps[:MAX_STEPS]
    ]
    if record.after_steps is not None:
        rows.append(("after the last step", record.after_steps))
    phases = (
        ("loading", record.loading),
        ("evaluations", record.evaluation),
        ("between steps", record.between_steps),
    )
    rows += [(f"of these, {name}", peaks) for name, peaks in phases if peaks is not None]
    more, closing = len(record.steps) - MAX_STEPS, []
    if more > 0:
        closing.append(f"and {more:,} more, which --json lists")
    if record.merged_from is not None:
        closing.append(f"from step {record.merged_from:,} on, one row has the largest peaks of all steps")
    return [_table("Optimizer step", rows), *([Paragraph("; ".join(closing))] if closing else [])]


def run_summary(explained: ExplainedRun) -> Summary:
    """Return the summary of an explained emulated run, for the page and the picture."""
    run = explained.run
    gpu = f"{run.gpu} (emulated)"
    name = program_name(run.command)
    stopped = f", stopped after {run.largest.step_count} optimizer steps" if run.largest.was_stopped else ""
    return Summary(
        name=name,
        title=f"{name} on {gpu}",
        caption=f"{name} on {gpu}",
        about=f"Emulated run: {shlex.join(run.command)}; exit code {run.exit_code}{stopped}; "
        f"{versions_text(run.largest)}",
        outcome=run.outcome,
        answer=_VERDICTS[run.outcome] if run.caught is None else f"The command fits {_CAUGHT}",
        entries=(*_failure_entries(run), *_crash_entries(run)),
        tiles=tuple(_tiles(explained)),
        parts=explained.parts,
        certainty="",
        assumptions=(*run.assumptions, *explained.notes),
        data={"emulated": True, "gpu": run.gpu, "command": list(run.command)},
    )


def _tiles(explained: ExplainedRun) -> Iterator[tuple[str, str]]:
    peak = explained.record.peak
    yield "process, as nvidia-smi shows it", tile_text(peak.process_bytes)
    yield "peak reserved", tile_text(peak.reserved_bytes)
    yield "peak allocated", tile_text(peak.allocated_bytes)
    yield "headroom", tile_text(explained.device.usable.value - peak.process_bytes)
    yield "optimizer steps", f"{explained.record.step_count:,}"


def command_plan_document(plan: CommandPlan) -> Document:
    """Return the report of `planner max-batch -- COMMAND`."""
    search, failure, at = plan.search, plan.first_failure, plan.at_comfortable or plan.at_max
    lines: list[str | Entry] = [Entry("Largest batch", _largest(plan))]
    if 0 < search.comfortable < search.largest:
        lines.append(Entry("With retries", f"{search.largest}: cached memory is released to make room"))
    if plan.covered:
        lines.append(Entry("Covered", plan.covered))
    lines.append(Entry("Found by", _method(plan)))
    lines += [Entry("Note", note) for note in plan.notes]
    lines += _what_ran(plan)
    beyond = f"Batch {search.first_failure} does not fit"
    steps = "" if at is None else f"{at.largest.step_count} optimizer steps stand for all later ones"
    timing = Paragraph(f"Took {plan.seconds:.1f} s: {plan.run_count} runs of the command", "faint")
    return Document.of(
        [Headline(lines, "good" if search.comfortable else "warning" if search.largest else "bad")],
        [] if at is None else _peaks(at),
        [] if failure is None else [Headline((beyond, *_failure_entries(failure)), "bad")],
        [*([] if at is None else _closing(at, steps)), timing],
    )


def _closing(run: EmulatedRun, *notes: str) -> list[Block]:
    return [Entry("Versions", versions_text(run.largest)), Bullets("Assumed", (*run.assumptions, *notes))]


def _largest(plan: CommandPlan) -> str:
    search = plan.search
    if search.largest >= LARGEST_BATCH // 2:
        return f"{search.largest}, where the search ends: memory does not depend on it"
    how = ", without retries" if search.comfortable else ", with retries" if search.largest else ""
    return f"{search.comfortable or search.largest} at confidence {plan.confidence:g}{how}"


def _method(plan: CommandPlan) -> str:
    ran = f"runs on the emulated GPU at batches {_listed([batch for batch, _ in plan.confirmed])}"
    if not plan.replayed:
        return ran
    return f"replay of the allocator's history at batches {_listed(plan.replayed)}; confirmed by {ran}"


def _listed(batches: Sequence[int]) -> str:
    *most, last = map(str, sorted(batches))
    return f"{', '.join(most)} and {last}" if most else last


# ---- JSON


def run_to_json(run: EmulatedRun, explained: ExplainedRun | None = None) -> dict[str, Any]:
    """Return the JSON object of `planner run`. It has a breakdown of the peak if the run was explained."""
    largest = run.largest
    notes = () if explained is None else explained.notes
    return {
        "schema": SCHEMA,
        "emulated": True,
        "gpu": run.gpu,
        "gpus": run.gpu_count,
        **attributes(run, "command", "exit_code"),
        "fits": run.outcome.value,
        **_peaks_to_json(largest.peak),
        "retries": largest.retries,
        "steps": _steps_to_json(largest),
        "failure": _failure_to_json(run.failure),
        "crash": run.crash or None,
        "ranks": [_rank_to_json(record) for record in run.records],
        "shared_gpus": [
            {"gpu": one.index, "ranks": list(one.ranks), "process_mib": mib(one.process_bytes)}
            for one in run.shared_gpus
        ],
        "versions": dict(largest.versions),
        "assumptions": [*run.assumptions, *notes],
        "seconds": round(run.seconds, 3),
        **({} if explained is None else breakdown_to_json(explained.explanation, DisplayLimits())),
    }


def _peaks_to_json(peaks: GpuPeaks) -> dict[str, float]:
    allocated, reserved = mib(peaks.allocated_bytes), mib(peaks.reserved_bytes)
    process = mib(peaks.process_bytes)
    return {"peak_allocated_mib": allocated, "peak_reserved_mib": reserved, "process_mib": process}


def _steps_to_json(record: GpuRecord) -> list[dict[str, Any]]:
    return [{"first": step.first, "last": step.last, **_peaks_to_json(step.peaks)} for step in record.steps]


def _rank_to_json(record: GpuRecord) -> dict[str, Any]:
    return {
        "rank": record.rank,
        "gpu": record.gpu_index,
        **_peaks_to_json(record.peak),
        "retries": record.retries,
        **attributes(record, "pinned_mib", "first_line", "step_count", "merged_from"),
        "steps": _steps_to_json(record),
        "after_steps": _optional_peaks_to_json(record.after_steps),
        "loading": _optional_peaks_to_json(record.loading),
        "evaluation": _optional_peaks_to_json(record.evaluation),
        "between_steps": _optional_peaks_to_json(record.between_steps),
        "failure": _failure_to_json(record.failure),
    }


def _optional_peaks_to_json(peaks: GpuPeaks | None) -> dict[str, float] | None:
    return None if peaks is None else _peaks_to_json(peaks)


def _failure_to_json(failure: OutOfMemory | None) -> dict[str, Any] | None:
    """Return the JSON object of an out-of-memory failure, or None without a failure."""
    if failure is None:
        return None
    fields = with_mib(failure) or {}
    del fields["was_raised"]
    return {**fields, "others": [with_mib(one) for one in failure.others]}


def command_plan_to_json(plan: CommandPlan) -> dict[str, Any]:
    """Return the JSON object of `planner max-batch -- COMMAND`. Values such as `at_max` are emulated runs."""
    return {
        "schema": SCHEMA,
        "emulated": True,
        "model": None,
        "command": list(plan.command),
        "gpu": plan.gpu,
        "gpus": plan.gpu_count,
        "confidence": plan.confidence,
        **search_to_json(plan, run_to_json),
        "answer_batch": plan.search.comfortable or plan.search.largest,
        **attributes(plan, "covered", "replayed", "confirmed", "notes"),
        "runs": plan.run_count,
        "seconds": round(plan.seconds, 3),
    }
