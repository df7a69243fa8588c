"""How far published runs lay from what the planner said of them: where its probabilities come from.

`residuals.json` is written by `benchmarks/accuracy.py` from the rows of `benchmarks/accuracy.csv`; nobody
edits it. It is read where a budget is made, without torch or NumPy.
"""

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from planner.errors import DataFileError
from planner.job import Job

RESIDUALS_FILE = Path(__file__).with_name("residuals.json")


class Kind(StrEnum):
    """Which published runs are like the one that is asked for."""

    FIXED = "fixed"  # every sample has the same size, as images do
    TEXTS = "texts"  # samples are sequences of tokens: real batches are padded to lengths of their own


@dataclass(frozen=True, slots=True)
class Spread:
    """A normal distribution of (memory that a run needs at the least) / (what its replay needs)."""

    outcomes: int  # published outcomes under caps that it is fitted to
    location: float  # its mean, less 1
    scale: float  # its standard deviation


@dataclass(frozen=True, slots=True)
class Residuals:
    """What is known of one kind of runs, without any calibration."""

    verdicts: Spread
    peak_ratios: tuple[float, ...]  # rising: process peak on an empty card over replayed peak reserved

    def peak_ratio(self, confidence: float) -> float:
        """What a share `confidence` of the peaks stays within; between ranks by the straight line."""
        return quantile(self.peak_ratios, confidence)


def kind_of(job: Job) -> Kind:
    """Texts, where the model takes whole numbers: tokens."""
    is_text = any(spec.dtype.startswith("int") for spec in job.inputs)
    return Kind.TEXTS if is_text else Kind.FIXED


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


def load_residuals(kind: Kind, path: Path = RESIDUALS_FILE) -> Residuals:
    """What is known of runs of this kind. Raises DataFileError for a file that does not say it."""
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["kinds"][kind.value]
        verdicts = found["verdicts"]
        spread = Spread(int(verdicts["outcomes"]), float(verdicts["location"]), float(verdicts["scale"]))
        ratios = tuple(float(ratio) for ratio in found["peak_ratios"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataFileError(f"{path}: broken residuals; run benchmarks/accuracy.py --from-csv") from error
    if not (ratios and list(ratios) == sorted(ratios) and spread.scale > 0):
        raise DataFileError(f"{path}: broken residuals; run benchmarks/accuracy.py --from-csv")
    return Residuals(spread, ratios)
