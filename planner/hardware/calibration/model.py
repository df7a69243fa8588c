"""Calibrations: `measured peak = overhead + slope * replayed peak reserved`, fitted over several batch sizes.

A calibration belongs to one job on one GPU. `files` reads and writes them, `fit` makes the line, `lookup`
selects the one that answers for a job.
"""

from collections.abc import Iterable
from math import sqrt
from typing import Annotated

from msgspec import Meta, Struct

from planner._support.conversion import LARGEST, Count, Positive, Text
from planner.hardware.calibration.observation import Observation, Origin, Settings, Versions
from planner.jobs import Job


class Point(Struct, frozen=True):
    """A run and its replayed peak."""

    observation: Observation
    replayed_bytes: int  # peak reserved of the replay without a limit


class Fit(Struct, frozen=True, forbid_unknown_fields=True):
    """The line through the points, and their deviation from it."""

    overhead_bytes: Annotated[int, Meta(ge=-LARGEST, le=LARGEST)]
    slope: Annotated[float, Meta(ge=0.01, le=100)]
    spread_bytes: Count  # one standard deviation: of the residuals and two more, of runs in general
    points: Annotated[int, Meta(ge=3, le=LARGEST)]
    center_bytes: Count  # mean of the replayed peaks
    width_bytes: Positive  # root of the sum of their squared distances from the mean
    highest_leverage: Annotated[float, Meta(ge=0, le=1)]  # 1: the line hangs on one point
    outliers: tuple[Positive, ...]  # batch sizes more than three spreads off the line

    def peak_bytes(self, replayed_bytes: int) -> int:
        """Return the peak that would be measured."""
        return round(self.overhead_bytes + self.slope * replayed_bytes)

    def leverage(self, replayed_bytes: int) -> float:
        """Return how far beyond the points a replayed peak lies: 1 / points in their middle, and rising."""
        return 1 / self.points + ((replayed_bytes - self.center_bytes) / self.width_bytes) ** 2

    def bound_bytes(self, replayed_bytes: int, confidence: float) -> int:
        """Return the one-sided upper prediction bound by Student's t, spread and leverage."""
        from scipy.special import stdtrit  # 60 ms, paid only by those who have a calibration

        # Of the degrees of freedom two go to the line, and two more are in the spread.
        deviations = float(stdtrit(self.points, confidence))
        margin = deviations * self.spread_bytes * sqrt(1 + self.leverage(replayed_bytes))
        return self.peak_bytes(replayed_bytes) + round(margin)


class NoFit(Struct, frozen=True, forbid_unknown_fields=True, rename={"reason": "refused"}):
    """The reason why the points support no line."""

    reason: Text


class Key(Struct, frozen=True):
    """The validity of a calibration; one file per key."""

    job: Job
    gpu: str
    versions: Versions
    settings: Settings


class Calibration(Struct, frozen=True):
    """The runs of one job on one GPU and the line through them."""

    key: Key
    source: Origin
    about: str  # where the figures come from, one sentence
    when: str  # the day of the last run, ISO 8601
    traced_with: str  # the version of torch under which the replayed peaks were traced
    includes_context: bool  # whether the overhead holds the CUDA context, or only what lies on top of it
    points: tuple[Point, ...]
    fit: Fit | NoFit

    @property
    def contexts(self) -> list[int]:
        """Return the known contexts after the third step, in bytes; emulated runs have none."""
        if self.source == "emulated":
            return []
        sizes = (point.observation.context_after_bytes for point in self.points)
        return [size_bytes for size_bytes in sizes if size_bytes is not None]

    def describe(self) -> str:
        """Return the calibration in a few words."""
        job, gpu, torch = self.key.job, self.key.gpu, self.key.versions.torch
        return f"{job.source or job.model} with {job.optimizer} on {gpu}, torch {torch}, {self.source}"


def fitted_peak_bytes(observation: Observation, with_context: bool) -> int | None:
    """Return the peak that is fitted: the process's, or its rise over the level before the first tensor."""
    return observation.process_peak_bytes if with_context else observation.rise_bytes


def includes_context(points: Iterable[Point]) -> bool:
    """Return whether all unconstrained runs have the process's peak; emulated ones lack the context."""
    runs = [point.observation for point in points if point.observation.is_unconstrained]
    return bool(runs) and all(run.process_peak_bytes is not None and run.source != "emulated" for run in runs)
