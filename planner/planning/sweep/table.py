"""What a sweep has found: a cell for each model, recipe and GPU."""

from dataclasses import dataclass

from planner.planning.sweep.grid import Grid


@dataclass(frozen=True, slots=True)
class Cell:
    """One model in one recipe on one GPU."""

    model: str
    recipe: str
    gpu: str
    total_mib: float
    max_batch: int  # 0 where not even 1 fits
    process_mib: float | None  # of that batch, as nvidia-smi shows it; None where nothing fits
    process_upper_mib: float | None  # the same at the confidence
    headroom_mib: float | None
    calibrated: bool
    source: str
    comfortable_batch: int  # the largest without retries; 0 where none runs without


@dataclass(frozen=True, slots=True)
class Failure:
    """A model in a recipe that gave no answer."""

    model: str
    recipe: str
    why: str


@dataclass(frozen=True, slots=True)
class SweepTable:
    """The grid with its cells."""

    grid: Grid
    cells: tuple[Cell, ...]  # by model, recipe and GPU in the order of the file
    failures: tuple[Failure, ...]
    notes: tuple[str, ...]
    unknown_ops: tuple[str, ...]
    new: int  # cells that this call computed
    seconds: float
