"""Peaks of optimizer steps, and of the phases between them.

The number of rows is bounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MOST_ROWS = 1000  # later steps share the last row, so that a run of any length has a record of bounded size
_Peaks = dict[int, dict[str, int]]  # by GPU and name, in bytes


class Steps:
    """Rows of consecutive optimizer steps, with the peaks of each GPU."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.merged_from: int | None = None  # first step of the last row, if its steps have different peaks

    def add(self, step: int, peaks: _Peaks) -> None:
        """Add a row for a step, or extend the last row if its peaks are equal or the rows are full."""
        last = self.rows[-1] if self.rows else None
        if last is None or (last["peaks"] != peaks and len(self.rows) < MOST_ROWS):
            self.rows.append({"first": step, "last": step, "peaks": peaks})
            return
        last["last"] = step
        if last["peaks"] != peaks:
            self.merged_from = last["first"]
            last["peaks"] = larger(last["peaks"], peaks)

    def devices(self) -> set[int]:
        """Return the GPUs that at least one step used."""
        return {device for row in self.rows for device in row["peaks"]}

    def of(self, device: int) -> list[dict[str, Any]]:
        """Return the rows in which a GPU has peaks, each with only that GPU's peaks."""
        return [{**row, "peaks": row["peaks"][device]} for row in self.rows if device in row["peaks"]]


class Phases:
    """The peaks of loading, of evaluations, and between the optimizer steps of a training run.

    Loading ends with the first module that runs while the process has memory on a GPU. The time between two
    steps ends with the first module of the second step: checkpoints are saved and batches are copied then. An
    evaluation lasts from a module that runs without gradients to the next module with gradients. Some
    training steps run a teacher or a generator without gradients. So after a step, modules without gradients
    are an evaluation only if more of them run than between the first two steps. Evaluations before the first
    step are ignored.
    """

    def __init__(self, read: Callable[[], _Peaks]) -> None:
        self.loading: _Peaks = {}
        self.evaluations: _Peaks = {}
        self.between_steps: _Peaks = {}
        self.before_step: int | None = None  # the optimizer step that follows the first evaluation
        self._read = read  # returns the peaks since its last call
        self._since_step: _Peaks = {}  # peaks since the last step, as far as they were read
        self._without_gradients: _Peaks = {}  # the part of `_since_step` from modules without gradients
        self._modules = 0  # number of modules that ran without gradients since the last step
        self._usual: int | None = None  # the same number between the first two steps; None until the second
        # Whether modules run without gradients now, and whether a step has ended.
        self._is_open = self._has_stepped = False
        self._has_run = False  # whether a module has run since the start or the last step
        self._runs_modules = False  # whether a module has run since the start

    def current(self, runs_module: bool) -> str:
        """Return the current phase, or "" if a step runs or the phase is unknown.

        The phases are "loading", "between steps" and "evaluation". `runs_module` says that a module runs now,
        even if no hook on modules has seen it.
        """
        if self._has_run or runs_module:
            is_evaluation = self._is_open and self._usual is not None and self._is_more
            return "evaluation" if is_evaluation else ""
        if self._has_stepped:
            return "between steps" if self._runs_modules else ""
        return "loading"

    def note_module(self, has_gradients: bool) -> None:
        """Record that a module is about to run, which may begin or end a phase."""
        if not self._has_run:
            self._take()
            self._has_run = self._runs_modules = bool(self._since_step)  # {}: no memory on a GPU yet
        if not self._has_stepped:
            return
        if has_gradients is self._is_open:
            self._take()
            self._is_open = not has_gradients
        self._modules += not has_gradients

    def end_step(self, step: int) -> _Peaks:
        """Record the end of an optimizer step, and return the peaks since the previous step."""
        if self._has_stepped and self._usual is None:
            self._usual = self._modules
        peaks = self._end_interval()
        if self._is_more and self.before_step is None:
            self.before_step = step
        self._since_step, self._without_gradients, self._modules = {}, {}, 0
        self._is_open, self._has_stepped, self._has_run = False, True, False
        return peaks

    def end(self) -> _Peaks:
        """Record the end of the script, and return the peaks since the last step."""
        return self._end_interval()

    @property
    def _is_more(self) -> bool:
        return self._modules > (self._usual or 0)

    def _end_interval(self) -> _Peaks:
        self._has_run = True  # a step without modules is no pause between steps
        self._take()
        if self._is_more:
            self.evaluations = larger(self.evaluations, self._without_gradients)
        return self._since_step

    def _take(self) -> None:
        peaks = self._read()
        self._since_step = larger(self._since_step, peaks)
        if self._is_open:
            self._without_gradients = larger(self._without_gradients, peaks)
        if self._has_run:
            return
        if self._has_stepped:
            self.between_steps = larger(self.between_steps, peaks)
        else:
            self.loading = larger(self.loading, peaks)


def larger(one: _Peaks, other: _Peaks) -> _Peaks:
    """Return the larger of two peaks for each GPU and peak name."""
    merged = {device: dict(peaks) for device, peaks in one.items()}
    for device, peaks in other.items():
        known = merged.setdefault(device, {})
        known.update({name: max(size, known.get(name, 0)) for name, size in peaks.items()})
    return merged
