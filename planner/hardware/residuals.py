"""Differences between runs and the planner's estimates, which give the margins and probabilities.

`residuals.json` is written by `benchmarks/accuracy` from the rows of its `accuracy.csv` (runs that others
measured) and of `benchmarks/emulated/answers.csv` (computed runs); nobody edits it. It is read when a budget
is made, without torch or NumPy.
"""

from collections.abc import Sequence
from enum import StrEnum
from math import ceil, floor
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from planner._support.conversion import decode_json
from planner.errors import DataFileError

RESIDUALS_FILE = Path(__file__).with_name("residuals.json")


class RunKind(StrEnum):
    """The kinds of published runs, each with its own distribution of residuals."""

    FIXED = "fixed sizes"  # only tensors, cuDNN's requests and the allocator decide the memory
    CONVOLUTIONS = "convolutions"  # with workspaces by a fitted term, in float32, cudnn.benchmark off
    BENCHMARK = "convolutions, cudnn.benchmark"  # in mixed precision, contiguous
    BENCHMARK_LAST = "convolutions, cudnn.benchmark, channels_last"  # in mixed precision
    TEXTS = "texts of varying lengths"
    LARGE = "billions of parameters"


class Doubt(StrEnum):
    """The reasons to widen the distribution of residuals of a kind of run."""

    SETTING = "setting"  # a setting that no run of the kind has
    STORED = "stored"  # stored answers for the convolutions
    SIMILAR = "similar"  # stored answers for similar convolutions
    VOLUMES = "volumes"  # stored answers for similar three-dimensional convolutions
    FAR = "far"  # stored answers for much larger or smaller convolutions, of images or sequences
    UNCOUNTED = "uncounted"  # no workspaces of convolutions, without a cuDNN and without stored answers


class Spread(Struct, frozen=True):
    """A normal distribution of a run's memory need divided by its replay's need."""

    outcomes: int  # published outcomes that it is fitted to
    location: float  # its mean minus 1
    scale: Annotated[float, Meta(ge=0)]  # its standard deviation


class KindSettings(Struct, frozen=True):
    """The precisions, memory formats and other settings that the published runs of one kind have.

    A job with a different setting has wider margins.
    """

    precisions: tuple[str, ...]
    cudnn_benchmark: tuple[bool, ...]
    memory_formats: tuple[str, ...]
    capabilities: tuple[tuple[int, int], ...]


class Residuals(Struct, frozen=True):
    """How far memory needs and peaks of uncalibrated published runs of a kind differ from their replays."""

    runs: str  # a text that says which runs these are
    peaks: int  # number of processes whose peak is known
    settings: KindSettings | None  # None if a job of the kind may have every setting
    verdicts: Spread
    peak_ratios: tuple[float, ...]  # ascending: process peak on an empty GPU over replayed peak reserved

    def __post_init__(self) -> None:
        if self.verdicts.scale <= 0 or list(self.peak_ratios) != sorted(self.peak_ratios):
            raise ValueError("no distribution")


class DoubtSpread(Struct, frozen=True):
    """The deviations that a doubt adds to a replay's memory need and peak, as fractions of them."""

    scale: Annotated[float, Meta(ge=0)]
    peak_scale: Annotated[float, Meta(ge=0)]  # on an empty GPU, where no workspace is refused
    rests_on: str  # a text that says which runs show it


class Published(Struct, frozen=True):
    """The residuals of published runs, by kind, and the extra deviation of each doubt."""

    kinds: dict[RunKind, Residuals]
    doubts: dict[Doubt, DoubtSpread]

    @property
    def widest(self) -> Spread:
        """Return a spread with the largest location and scale of all kinds, for jobs that resemble no run."""
        spreads = [one.verdicts for one in self.kinds.values()]
        location = max(spread.location for spread in spreads)
        return Spread(0, location, max(spread.scale for spread in spreads))


def quantile(rising: Sequence[float], share: float) -> float:
    """Return the quantile at `share` of values in ascending order.

    The i-th of n values (from 1) is taken as the i / (n + 1) quantile. Quantiles in between are interpolated
    linearly; quantiles outside the values are the first or the last value.

    >>> quantile((1.0, 2.0, 3.0), 0.5), quantile((1.0, 2.0, 3.0), 0.375)
    (2.0, 1.5)
    """
    place = min(max(share * (len(rising) + 1) - 1, 0), len(rising) - 1)
    below, above = rising[floor(place)], rising[ceil(place)]
    return below + (place - floor(place)) * (above - below)


def load_residuals(path: Path = RESIDUALS_FILE) -> Published:
    """Read the residuals of all kinds of runs and the deviations of all doubts from a file.

    Raises DataFileError if the file is unreadable or incomplete.
    """
    try:
        published = decode_json(path.read_bytes(), Published)
        if published.kinds.keys() != set(RunKind) or published.doubts.keys() != set(Doubt):
            raise ValueError("a kind or a doubt is missing")
    except (OSError, ValueError, RecursionError) as error:
        problem = "broken residuals; run python -m benchmarks.accuracy --from-csv"
        raise DataFileError(f"{path}: {problem}") from error
    return published
