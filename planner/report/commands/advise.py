"""The advice on a batch that does not fit, as text and as JSON."""

from collections.abc import Sequence
from typing import Any

from planner.jobs import job_to_json
from planner.planning import Advice, Trial
from planner.program import Outcome
from planner.report.commands.as_json import SCHEMA, device_to_json, estimate_to_json
from planner.report.layout import WIDTH, entry, job_text, time_text, wrapped
from planner.report.units import mib

_NAMES = 44  # columns of the options
MICRO_BATCHES = "--batch with --accumulate is that of one micro-batch; the optimizer still sees all."
NO_SET = "No set of up to three changes makes it fit; take a smaller batch or a larger GPU"
SETS = "Any one of these makes it fit, the mildest first; each was traced and replayed"


def advice_text(advice: Advice, import_seconds: float) -> str:
    """The report of `planner advise`."""
    lines = [*verdict_lines(advice), *entry("Job", job_text(advice.unchanged.recipe.job))]
    if not advice.unchanged.fits:
        lines += ["", *_sets(advice.sets)]
    lines += ["", *_singles(advice)]
    for text in failed_texts(advice):
        lines += wrapped("  - ", text)
    if is_split(advice):
        lines += ["", MICRO_BATCHES]
    return "\n".join([*lines, "", took(advice, import_seconds)])


def failed_texts(advice: Advice) -> list[str]:
    """The changes that the model does not go along with."""
    return [f"{name} is out of the question: {reason}" for name, reason in advice.failed]


def is_split(advice: Advice) -> bool:
    """Whether any set splits the batch."""
    return any("accumulate" in change.name for trial in advice.sets for change in trial.changes)


def took(advice: Advice, import_seconds: float) -> str:
    """Where the seconds went."""
    return time_text({"importing": import_seconds, "trying": advice.seconds})


def verdict_lines(advice: Advice) -> list[str]:
    """Whether the batch fits as it is, and what is missing."""
    trial, sure = advice.unchanged, f"at confidence {advice.unchanged.estimate.budget.confidence:g}"
    if trial.fits:
        how = ", though with allocator retries, which take time" if _retries(trial) else ""
        return [f"Batch {trial.recipe.batch} fits {sure} as it is{how}; what each change would save is below"]
    needed, has = mib(trial.needed_bytes, 0), mib(advice.available_bytes or 0, 0)
    return [
        f"Batch {trial.recipe.batch} does not fit {sure}: the allocator needs {needed:,.0f} MiB and gets "
        f"{has:,.0f} MiB",
        f"{needed - has:,.0f} MiB have to go",
    ]


def _sets(sets: Sequence[Trial]) -> list[str]:
    if not sets:
        return [NO_SET]
    lines = [SETS]
    for number, trial in enumerate(sets, 1):
        lines.append(f"  {number}. {set_text(trial)}")
        for change in trial.changes:
            lines += _named(change.name, change.cost)
    return lines


def set_text(trial: Trial) -> str:
    """What the process takes with a set of changes."""
    retries = ", releasing cached memory on the way" if _retries(trial) else ""
    return f"{mib(trial.estimate.process_bytes, 0):,.0f} MiB for the process{retries}"


def _singles(advice: Advice) -> list[str]:
    lines = [f"{'Each change by itself':<{_NAMES + 6}}{'needs MiB':>11}{'saves':>10}"]
    for trial in advice.singles:
        saved = advice.unchanged.needed_bytes - trial.needed_bytes
        fits = "  fits" if trial.fits and not advice.unchanged.fits else ""
        name = trial.changes[0].name
        figures = f"{mib(trial.needed_bytes, 0):>11,.0f}{mib(saved, 0):>10,.0f}{fits}"
        lines.append(f"  {name:<{_NAMES + 4}}{figures}")
    return lines


def _named(name: str, cost: str) -> list[str]:
    beginning = f"     {name:<{_NAMES}} "
    assert len(beginning) < WIDTH
    return wrapped(beginning, cost)


def _retries(trial: Trial) -> bool:
    return trial.estimate.outcome is Outcome.FITS_WITH_RETRIES


def advice_to_json(advice: Advice, import_seconds: float) -> dict[str, Any]:
    """The JSON object of `planner advise`; `needed_mib` is the least that the allocator needs."""
    unchanged = advice.unchanged
    available = advice.available_bytes
    return {
        "schema": SCHEMA,
        "model": unchanged.recipe.job.model,
        "batch": unchanged.recipe.batch,
        "job": job_to_json(unchanged.recipe.job),
        "device": device_to_json(unchanged.estimate.budget),
        "confidence": unchanged.estimate.budget.confidence,
        "fits": unchanged.estimate.outcome.value,
        "needed_mib": mib(unchanged.needed_bytes),
        "available_mib": None if available is None else mib(available),
        "sets": [_set_to_json(trial, unchanged, import_seconds) for trial in advice.sets],
        "single_changes": [
            {
                "option": trial.changes[0].name,
                "cost": trial.changes[0].cost,
                "needed_mib": mib(trial.needed_bytes),
                "saved_mib": mib(unchanged.needed_bytes - trial.needed_bytes),
                "fits": trial.estimate.outcome.value,
            }
            for trial in advice.singles
        ],
        "failed": [{"option": name, "reason": reason} for name, reason in advice.failed],
        "seconds": {"import": round(import_seconds, 3), "try": round(advice.seconds, 3)},
    }


def _set_to_json(trial: Trial, unchanged: Trial, import_seconds: float) -> dict[str, Any]:
    return {
        "changes": [{"option": change.name, "cost": change.cost} for change in trial.changes],
        "needed_mib": mib(trial.needed_bytes),
        "saved_mib": mib(unchanged.needed_bytes - trial.needed_bytes),
        "estimate": estimate_to_json(trial.estimate, import_seconds),
    }
