"""Diagnose the JSON record of `planner run`."""

from collections.abc import Mapping, Sequence
from typing import Any

from planner.planning.diagnosis.diagnosis import Cause, Diagnosis, Held, Place, names_evaluation, size_text

_PHASES = {"loading": "before any module ran", "between steps": "before its first module"}
_GROWING_STEPS = 3  # after the first, whose peak has no earlier step's memory


def diagnose_run(record: Mapping[str, Any]) -> Diagnosis:
    """Diagnose the failure in a JSON record of `planner run`.

    Raises KeyError, TypeError, ValueError, AttributeError or OverflowError for any other JSON.
    """
    gpu, failure = record.get("gpu"), record.get("failure")
    source = f"record of planner run on an emulated {gpu}"
    peaks = _bytes(record["peak_allocated_mib"]), _bytes(record["peak_reserved_mib"])
    if not isinstance(failure, dict):
        reason = "the run did not run out of memory"
        if record.get("exit_code"):
            reason += f"; the command ended with exit code {record['exit_code']}"
        return Diagnosis(source, Cause.NO_FAILURE, reason, None, *peaks)
    requested = _bytes(failure["requested_mib"])
    steps = [step for step in record["steps"] if step["first"] == step["last"]]
    levels = [_bytes(step["peak_allocated_mib"]) for step in steps]
    phase, module = str(failure.get("phase") or ""), str(failure.get("module") or "")
    place = Place(", ".join(filter(None, (str(failure.get("line") or ""), module))), f"{phase}".strip())
    where = f"step {failure['step']}, {_PHASES.get(phase, phase) or 'phase not known'}"
    growth = _growth(levels)
    if growth is not None and levels[-1] - levels[0] >= requested:
        cause = Cause.GROWTH
        reason = (
            f"the peak rises by at least {size_text(growth)} a step, from {size_text(levels[0])} in step "
            f"{steps[0]['first']} to {size_text(levels[-1])} in step {steps[-1]['last']}; the memory ends in "
            f"{where}"
        )
    elif requested > peaks[0]:
        cause = Cause.ONE_REQUEST
        reason = (
            f"{size_text(requested)} were asked for at once in {where}; all before took {size_text(peaks[0])}"
        )
    elif names_evaluation(phase) or names_evaluation(module):
        cause, reason = Cause.EVALUATION, f"it happened in {where}, an evaluation"
    elif phase == "optimizer" and failure["step"] == 1:
        cause = Cause.FIRST_STEP
        reason = "the optimizer allocated its state in the first step; the rest fits without it"
    elif peaks[1] - peaks[0] >= requested:
        cause = Cause.FRAGMENTATION
        reason = (
            f"{size_text(peaks[1] - peaks[0])} were reserved beyond the peak of tensors, more than the "
            f"{size_text(requested)} asked for in {where}"
        )
    else:
        cause = Cause.TOO_LARGE
        more = f"{size_text(requested)} more were asked for in {where}"
        reason = f"tensors took up to {size_text(peaks[0])}, and {more}"
    live = (Held("tensors and workspaces of PyTorch, at the peak", peaks[0]),)
    notes = ("the record of a run has peaks, not blocks; --snapshot FILE has both, and can be diagnosed too",)
    return Diagnosis(source, cause, reason, requested, *peaks, None, place, live, notes=notes)


def _growth(levels: Sequence[int]) -> int | None:
    """Return the smallest rise between successive steps after the first, or None if a step does not rise.

    None also if there are fewer than `_GROWING_STEPS` steps after the first.
    """
    later = levels[1:]
    if len(later) < _GROWING_STEPS:
        return None
    least = min(after - before for before, after in zip(later, later[1:], strict=False))
    return least if least > 0 else None


def _bytes(mib: float) -> int:
    return round(mib * 2**20)
