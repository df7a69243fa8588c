"""Reports of commands that ran on emulated GPUs: `planner run`, and `planner max-batch -- COMMAND`."""

import shlex
from collections.abc import Sequence
from typing import Any

from planner.emulator import EmulatedRun, GpuRecord, OutOfMemory, Peaks
from planner.planning import LARGEST_BATCH, Search, Shown
from planner.planning.command import CommandPlan, ExplainedRun
from planner.program import Outcome
from planner.report.commands.as_json import SCHEMA
from planner.report.commands.explain import breakdown_sections, level_text
from planner.report.commands.explain_json import breakdown_to_json
from planner.report.layout import DIGITS, entry, wrapped
from planner.report.units import mib

MAX_STEPS = 12  # entries of the table
_VERDICTS = {
    Outcome.FITS: "yes",
    Outcome.FITS_WITH_RETRIES: "yes, with retries: cached memory was released to make room",
    Outcome.DOES_NOT_FIT: "no: out of memory",
}


def run_to_json(run: EmulatedRun, explained: ExplainedRun | None = None) -> dict[str, Any]:
    """Return the JSON object of `planner run`; with where the memory goes, if that is known."""
    largest = run.largest
    notes = () if explained is None else explained.notes
    return {
        "schema": SCHEMA,
        "emulated": True,
        "gpu": run.gpu,
        "gpus": run.gpu_count,
        "command": list(run.command),
        "exit_code": run.exit_code,
        "fits": run.outcome.value,
        **_peaks_to_json(largest.peak),
        "retries": largest.retries,
        "steps": _steps_to_json(largest),
        "failure": _failure_to_json(run.failure),
        "ranks": [_rank_to_json(record) for record in run.records],
        "versions": dict(largest.versions),
        "assumptions": [*run.assumptions, *notes],
        "seconds": round(run.seconds, 3),
        **({} if explained is None else breakdown_to_json(explained.explanation, Shown())),
    }


def _peaks_to_json(peaks: Peaks) -> dict[str, float]:
    return {
        "peak_allocated_mib": mib(peaks.allocated_bytes),
        "peak_reserved_mib": mib(peaks.reserved_bytes),
        "process_mib": mib(peaks.process_bytes),
    }


def _steps_to_json(record: GpuRecord) -> list[dict[str, Any]]:
    return [{"first": step.first, "last": step.last, **_peaks_to_json(step.peaks)} for step in record.steps]


def _rank_to_json(record: GpuRecord) -> dict[str, Any]:
    after = record.after_steps
    return {
        "rank": record.rank,
        "gpu": record.device,
        **_peaks_to_json(record.peak),
        "retries": record.retries,
        "pinned_mib": mib(record.pinned_bytes),
        "step_count": record.step_count,
        "steps": _steps_to_json(record),
        "after_steps": None if after is None else _peaks_to_json(after),
        "failure": _failure_to_json(record.failure),
    }


def _failure_to_json(failure: OutOfMemory | None) -> dict[str, Any] | None:
    if failure is None:
        return None
    return {
        "step": failure.step,
        "phase": failure.phase,
        "module": failure.module,
        "line": failure.line,
        "requested_mib": mib(failure.requested_bytes),
    }


def run_text(run: EmulatedRun, explained: ExplainedRun | None = None) -> str:
    """Return the report as plain text; with where the memory goes, if that is known."""
    largest = run.largest
    count = f"{run.gpu_count} x " if run.gpu_count > 1 else ""
    stopped = f"; stopped after {largest.step_count} optimizer steps" if largest.was_stopped else ""
    notes = () if explained is None else explained.notes
    lines = [
        *entry("Fits", _VERDICTS[run.outcome]),
        *failure_lines(run.failure),
        *entry("GPU", f"{count}{run.gpu} (emulated)"),
        *entry("Command", f"{shlex.join(run.command)}; exit code {run.exit_code}{stopped}"),
        "",
        *_peak_lines(run),
        "",
        *_step_lines(largest),
        "",
        *([] if explained is None else _explained_lines(explained)),
        *entry("Versions", versions_text(largest)),
        "Assumed",
        *(line for sentence in (*run.assumptions, *notes) for line in wrapped("  - ", sentence)),
        f"Took {run.seconds:.1f} s",
    ]
    return "\n".join(lines)


def _explained_lines(explained: ExplainedRun) -> list[str]:
    """Return the peak of the process that takes most, by category, module and tensor."""
    lines = [*entry("Peak allocated", level_text(explained.explanation)), ""]
    for section in breakdown_sections(explained.parts, explained.explanation, Shown()):
        lines += [*section, ""] if section else []
    return lines


def failure_lines(failure: OutOfMemory | None) -> list[str]:
    """Return where memory ran out, if it did."""
    if failure is None:
        return []
    parts = [
        f"before optimizer step {failure.step} ended",
        f"{failure.phase} pass" if failure.phase else "",
        f"module {failure.module}" if failure.module else "",
        failure.line,
        f"no room for {mib(failure.requested_bytes, DIGITS):,} MiB",
    ]
    return entry("Fails", ", ".join(part for part in parts if part))


def versions_text(record: GpuRecord) -> str:
    """Return the versions of torch and its libraries."""
    return ", ".join(f"{name} {version}" for name, version in record.versions)


def _row(name: str, peaks: Peaks) -> str:
    figures = (peaks.allocated_bytes, peaks.reserved_bytes, peaks.process_bytes)
    return f"  {name:<26}" + "".join(f"{mib(one, DIGITS):>14,.1f}" for one in figures)


def _heading(name: str) -> str:
    return f"{name:<28}{'allocated':>14}{'reserved':>14}{'nvidia-smi':>14} MiB"


def _peak_lines(run: EmulatedRun) -> list[str]:
    several = len(run.records) > 1
    names = [f"rank {one.rank}, GPU {one.device}" if several else "whole run" for one in run.records]
    rows = [_row(name, record.peak) for name, record in zip(names, run.records, strict=True)]
    return [_heading("Peak"), *rows]


def _step_lines(record: GpuRecord) -> list[str]:
    shown = record.steps if len(record.steps) <= MAX_STEPS else record.steps[:MAX_STEPS]
    rows = [
        _row(f"{step.first}" if step.first == step.last else f"{step.first} to {step.last}", step.peaks)
        for step in shown
    ]
    if len(shown) < len(record.steps):
        rows.append(f"  and {len(record.steps) - len(shown)} more, which --json lists")
    if record.after_steps is not None:
        rows.append(_row("after the last step", record.after_steps))
    return [_heading("Optimizer step"), *rows]


def command_plan_to_json(plan: CommandPlan) -> dict[str, Any]:
    """Return the JSON object of `planner max-batch -- COMMAND`; `at_max` and its like are runs."""

    def nested(run: EmulatedRun | None) -> dict[str, Any] | None:
        return None if run is None else run_to_json(run)

    return {
        "schema": SCHEMA,
        "emulated": True,
        "model": None,
        "command": list(plan.command),
        "gpu": plan.gpu,
        "gpus": plan.gpu_count,
        "confidence": plan.confidence,
        "max_batch": plan.search.largest,
        "comfortable_batch": plan.search.comfortable,
        "answer_batch": plan.search.comfortable or plan.search.largest,
        "at_max": nested(plan.at_max),
        "at_comfortable": nested(plan.at_comfortable),
        "first_failure": nested(plan.first_failure),
        "probes": [[batch, outcome.value] for batch, outcome in plan.search.probes],
        "replayed": list(plan.replayed),
        "confirmed": [[batch, outcome.value] for batch, outcome in plan.confirmed],
        "notes": list(plan.notes),
        "runs": plan.run_count,
        "seconds": round(plan.seconds, 3),
    }


def plan_text(plan: CommandPlan) -> str:
    """Return the report as plain text, at most 100 columns wide."""
    found = plan.search
    sure = f"at confidence {plan.confidence:g}"
    if found.largest >= LARGEST_BATCH // 2:
        lines = entry(
            "Largest batch", f"{found.largest}, where the search ends: memory does not depend on it"
        )
    else:
        lines = entry("Largest batch", f"{found.comfortable or found.largest} {sure}{_retrying(found)}")
    if 0 < found.comfortable < found.largest:
        lines += entry("With retries", f"{found.largest}: cached memory is released to make room")
    lines += entry("Found by", _how(plan))
    lines += [line for note in plan.notes for line in entry("Note", note)]
    lines += entry("GPU", f"{f'{plan.gpu_count} x ' if plan.gpu_count > 1 else ''}{plan.gpu} (emulated)")
    lines += entry("Command", shlex.join(plan.command))
    at = plan.at_comfortable or plan.at_max
    if at is not None:
        lines += ["", *_peak_lines(at)]
    if plan.first_failure is not None:
        lines += [
            "",
            f"Batch {found.first_failure} does not fit",
            *failure_lines(plan.first_failure.failure),
        ]
    if at is not None:
        versions = versions_text(at.largest)
        assumed = (*at.assumptions, f"{at.largest.step_count} optimizer steps stand for all later ones")
        lines += ["", *entry("Versions", versions), "Assumed"]
        lines += [line for sentence in assumed for line in wrapped("  - ", sentence)]
    return "\n".join([*lines, f"Took {plan.seconds:.1f} s: {plan.run_count} runs of the command"])


def _how(plan: CommandPlan) -> str:
    ran = f"runs on the emulated GPU at batches {_listed([batch for batch, _ in plan.confirmed])}"
    if not plan.replayed:
        return ran
    return f"replay of the allocator's history at batches {_listed(plan.replayed)}; confirmed by {ran}"


def _listed(batches: Sequence[int]) -> str:
    *most, last = map(str, sorted(batches))
    return f"{', '.join(most)} and {last}" if most else last


def _retrying(found: Search) -> str:
    if not found.largest:
        return ""
    return ", without retries" if found.comfortable else ", with retries"
