"""Diagnose the JSON record of `planner run`."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from planner.planning.diagnosis.diagnosis import Cause, Diagnosis, Held, Place, size_text
from planner.planning.diagnosis.from_frames import names_evaluation

_PHASES = {"loading": "before any module ran", "between steps": "before its first module"}
_LEAST_LEVELS = 3  # while memory grows, no level lasts for more than a third of the steps


class _Level(NamedTuple):
    """Consecutive optimizer steps of equal allocated peaks."""

    first: int
    last: int
    peak_bytes: int

    @property
    def steps(self) -> int:
        """Return the number of steps."""
        return self.last - self.first + 1


def diagnose_run(record: Mapping[str, Any]) -> Diagnosis:
    """Diagnose a JSON record of `planner run`, with or without a failure.

    Raises KeyError, TypeError, ValueError, AttributeError or OverflowError for any other JSON.
    """
    gpu, failure = record.get("gpu"), record.get("failure")
    source = f"record of planner run on an emulated {gpu}"
    peaks = _bytes(record["peak_allocated_mib"]), _bytes(record["peak_reserved_mib"])
    if not isinstance(failure, dict):
        reason = "no failed request ended the command; the record has none whose error a script handles"
        if record.get("exit_code"):
            reason += f"; the command ended with exit code {record['exit_code']}"
        return Diagnosis(source, Cause.NO_FAILURE, reason, None, *peaks)
    requested = _bytes(failure["requested_mib"])
    phase, module = str(failure.get("phase") or ""), str(failure.get("module") or "")
    code = str(failure.get("line") or ""), f"module {module}" if module else ""
    place = Place(", ".join(filter(None, code)), phase)
    where = f"step {failure['step']}, {_PHASES.get(phase, phase) or 'phase not known'}"
    growing = _growing(_levels(record["steps"]))
    if growing and growing[-1].peak_bytes - growing[0].peak_bytes >= requested:
        cause = Cause.GROWTH
        low, high = growing[0], growing[-1]
        reason = (
            f"the peak rises {len(growing) - 1} times and never falls, from {size_text(low.peak_bytes)} in "
            f"step {low.first} to {size_text(high.peak_bytes)} in step {high.last}; memory ends in {where}"
        )
    elif requested > peaks[0]:
        cause = Cause.ONE_REQUEST
        reason = (
            f"{size_text(requested)} were asked for at once in {where}; all before took {size_text(peaks[0])}"
        )
    elif names_evaluation(phase):
        cause, reason = Cause.EVALUATION, f"it happened in {where}, an evaluation"
    elif phase == "optimizer" and failure["step"] == 1:
        cause = Cause.FIRST_STEP
        reason = "it happened in the optimizer's first step, which allocates its state; the rest fits without"
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


def _levels(rows: Iterable[Mapping[str, Any]]) -> list[_Level]:
    """Merge consecutive steps of equal allocated peaks in a run's record, and return the levels."""
    levels: list[_Level] = []
    for row in rows:
        level = _Level(row["first"], row["last"], _bytes(row["peak_allocated_mib"]))
        if levels and levels[-1].peak_bytes == level.peak_bytes:
            level = levels.pop()._replace(last=level.last)
        levels.append(level)
    return levels


def _growing(levels: Sequence[_Level]) -> Sequence[_Level]:
    """Return the last levels that rise, or () if memory does not grow.

    The first level, whose step has no memory of an earlier step, is left out. Memory grows if the rising
    levels have at least half of all steps, and no level more than a third of the rising levels' steps.
    """
    falls = (at for at in range(1, len(levels)) if levels[at].peak_bytes < levels[at - 1].peak_bytes)
    rising = levels[max(falls, default=1) :]
    steps = sum(level.steps for level in rising)
    longest = max((level.steps for level in rising), default=0)
    is_growth = 2 * steps >= sum(level.steps for level in levels) and _LEAST_LEVELS * longest <= steps
    return rising if is_growth else ()


def _bytes(mib: float) -> int:
    return round(mib * 2**20)
