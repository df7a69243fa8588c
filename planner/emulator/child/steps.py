"""Peaks of optimizer steps, in a bounded number of rows."""

from __future__ import annotations

from typing import Any

MOST_ROWS = 1000  # later steps share the last row, so that a run of any length has a record of bounded size
_Peaks = dict[int, dict[str, int]]  # by GPU and name, in bytes


class Steps:
    """Rows of optimizer steps that follow each other, with the peaks of each GPU."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.merged_from: int | None = None  # the step from which on one row has the largest peaks of all

    def add(self, step: int, peaks: _Peaks) -> None:
        """Add a step as a row, or to the last row if the peaks are equal or the rows are too many."""
        last = self.rows[-1] if self.rows else None
        if last is None or (last["peaks"] != peaks and len(self.rows) < MOST_ROWS):
            self.rows.append({"first": step, "last": step, "peaks": peaks})
            return
        last["last"] = step
        if last["peaks"] != peaks:
            self.merged_from = last["first"]
            last["peaks"] = _larger(last["peaks"], peaks)

    def devices(self) -> set[int]:
        """Return the GPUs that any step used."""
        return {device for row in self.rows for device in row["peaks"]}

    def of(self, device: int) -> list[dict[str, Any]]:
        """Return the rows of one GPU."""
        return [{**row, "peaks": row["peaks"][device]} for row in self.rows if device in row["peaks"]]


def _larger(one: _Peaks, other: _Peaks) -> _Peaks:
    """Return the larger of both peaks, for each GPU."""
    merged = {device: dict(peaks) for device, peaks in one.items()}
    for device, peaks in other.items():
        known = merged.setdefault(device, {})
        known.update({name: max(size, known.get(name, 0)) for name, size in peaks.items()})
    return merged
