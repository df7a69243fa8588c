"""How far published runs lay from the planner's answers: the source of its margins and probabilities.

`residuals.json` is written by `benchmarks/accuracy` from the rows of `benchmarks/accuracy/accuracy.csv`;
nobody edits it. It is read where a budget is made, without torch or NumPy.
"""

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from planner.errors import DataFileError

RESIDUALS_FILE = Path(__file__).with_name("residuals.json")


class Kind(StrEnum):
    """Published runs that have their own distribution."""

    CONVOLUTIONS = "convolutions"  # images in float32, cudnn.benchmark off
    BENCHMARK = "convolutions, cudnn.benchmark"  # in mixed precision, contiguous
    BENCHMARK_LAST = "convolutions, cudnn.benchmark, channels_last"  # in mixed precision
    ATTENTION = "attention, fixed lengths"
    TEXTS = "texts of varying lengths"
    LARGE = "billions of parameters"


@dataclass(frozen=True, slots=True)
class Spread:
    """A normal distribution of (memory that a run needs at the least) / (what its replay needs)."""

    outcomes: int  # published outcomes that it is fitted to
    location: float  # its mean, less 1
    scale: float  # its standard deviation


@dataclass(frozen=True, slots=True)
class Settings:
    """How the runs of a kind trained; a job that trains otherwise is not quite like them."""

    precisions: tuple[str, ...]
    cudnn_benchmark: tuple[bool, ...]
    memory_formats: tuple[str, ...]
    capabilities: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Residuals:
    """The published runs of one kind, without any calibration."""

    kind: Kind
    runs: str  # which runs these are, for people
    peaks: int  # of processes
    settings: Settings
    verdicts: Spread
    peak_ratios: tuple[float, ...]  # rising: process peak on an empty card over replayed peak reserved


@dataclass(frozen=True, slots=True)
class Published:
    """The residuals of all kinds."""

    kinds: dict[Kind, Residuals]
    between: float  # standard deviation between the means of kinds and GPUs

    @property
    def widest(self) -> Spread:
        """Return a spread as wide as any kind's, for jobs that no published run is like."""
        spreads = [one.verdicts for one in self.kinds.values()]
        location = max(spread.location for spread in spreads)
        return Spread(0, location, max(spread.scale for spread in spreads))


def quantile(rising: Sequence[float], share: float) -> float:
    """What a further value stays within, with this probability: the i-th of n values (from 1) is taken as the
    i / (n + 1) quantile, between ranks the straight line holds, beyond the last one its value.

    >>> quantile((1.0, 2.0, 3.0), 0.5), quantile((1.0, 2.0, 3.0), 0.375)
    (2.0, 1.5)
    """
    place = share * (len(rising) + 1) - 1
    if place <= 0:
        return rising[0]
    if place >= len(rising) - 1:
        return rising[-1]
    below = int(place)
    return rising[below] + (place - below) * (rising[below + 1] - rising[below])


def share_within(rising: Sequence[float], value: float) -> float:
    """How much of a sample lies below a value."""
    return bisect_left(rising, value) / len(rising)


def load_residuals(path: Path = RESIDUALS_FILE) -> Published:
    """Return the residuals of all kinds. Raises DataFileError for a file that does not hold them."""
    try:
        said: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        kinds = {kind: _residuals(kind, said["kinds"][kind.value]) for kind in Kind}
        between = float(said["between"])
        if between < 0 or not all(map(_is_sound, kinds.values())):
            raise ValueError("no distribution")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataFileError(
            f"{path}: broken residuals; run python -m benchmarks.accuracy --from-csv"
        ) from error
    return Published(kinds, between)


def _residuals(kind: Kind, said: dict[str, Any]) -> Residuals:
    verdicts, settings = said["verdicts"], said["settings"]
    return Residuals(
        kind,
        str(said["runs"]),
        int(said["peaks"]),
        Settings(
            tuple(map(str, settings["precisions"])),
            tuple(map(bool, settings["cudnn_benchmark"])),
            tuple(map(str, settings["memory_formats"])),
            tuple((int(major), int(minor)) for major, minor in settings["capabilities"]),
        ),
        Spread(int(verdicts["outcomes"]), float(verdicts["location"]), float(verdicts["scale"])),
        tuple(float(ratio) for ratio in said["peak_ratios"]),
    )


def _is_sound(one: Residuals) -> bool:
    return one.verdicts.scale > 0 and list(one.peak_ratios) == sorted(one.peak_ratios)
