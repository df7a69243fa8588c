"""The data of calibrations: `measured peak = overhead + slope * replayed peak reserved`, and its runs.

A calibration belongs to one job on one GPU, and its line is fitted over several batch sizes. Its runs are
observations, which probes make; a figure that was not measured is None, never 0. A run on an emulated GPU is
never called measured: its source is `emulated`, in every record. `files` reads and writes calibrations, `fit`
fits the line, and `lookup` selects the calibration that answers for a job.
"""

from collections.abc import Iterable
from math import sqrt
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, Struct

from planner._support.conversion import LARGEST, Count, Positive, Text
from planner.hardware.database import is_emulated

if TYPE_CHECKING:
    from planner.jobs import Job
else:
    Job = Any  # msgspec does not convert a job: `planner.jobs.job_from_json` reads it

Origin = Literal["measured", "published", "emulated", "contributed"]  # contributed: measured by a user
_Level = Annotated[int, Meta(ge=0, le=99)]


def origin_of(gpu: str) -> Origin:
    """Return "emulated" if `gpu` is the name of an emulated GPU, else "measured"."""
    return "emulated" if is_emulated(gpu) else "measured"


class Versions(Struct, frozen=True, forbid_unknown_fields=True):
    """The versions of software in a run, and the memory of its GPU; a figure not recorded is None."""

    torch: Text  # as in `torch.__version__`: "2.6.0+cu124"
    cuda: Text | None  # `torch.version.cuda`: "12.4"
    cudnn: Text | None  # "9.1.0"
    driver: Text | None  # "550.54.15"
    capability: tuple[_Level, _Level]  # compute capability: (8, 6)
    torch_total_bytes: Count | None  # the GPU's memory by `torch.cuda.get_device_properties`
    nvml_total_bytes: Count | None  # the GPU's memory by nvidia-smi


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """The TF32 and allocator settings of a process, which affect its memory and are no part of its job."""

    matmul_tf32: bool = False  # `torch.backends.cuda.matmul.allow_tf32`
    cudnn_tf32: bool = True  # `torch.backends.cudnn.allow_tf32`
    alloc_conf: str = ""  # the text of PYTORCH_ALLOC_CONF
    allocator_cap_bytes: Count | None = None  # as `set_per_process_memory_fraction` bounds the allocator


class Observation(Struct, frozen=True, forbid_unknown_fields=True):
    """One run of a job at a batch size: its GPU, versions, settings and memory figures.

    Each run has a fresh process. Raises ValueError if `source` does not agree with the GPU: emulated or not.
    """

    job: Job
    batch: Positive
    gpu: Text  # as torch names it: "NVIDIA GeForce RTX 3060"
    versions: Versions
    settings: Settings
    oom: bool  # whether the run ran out of memory; its peaks are of the time until the failure
    source: Origin
    about: str  # of a published run, the author and the file of the figures; else a remark or ""
    when: Text  # the day of the run, ISO 8601: "2025-05-06"
    peak_allocated_bytes: Count | None = None  # torch's `max_memory_allocated`
    peak_reserved_bytes: Count | None = None  # torch's `max_memory_reserved`
    end_allocated_bytes: Count | None = None  # after the last step
    process_peak_bytes: Count | None = None  # NVML's, with the context
    context_before_bytes: int | None = None  # NVML's level before the first tensor
    context_after_bytes: int | None = None  # NVML's level after the third step minus torch's reserved memory
    retries: Count | None = None  # times that the allocator released cached segments to serve a request
    # The process's peak minus its level before the first tensor, if a record has only this difference; None
    # if both are known and given above.
    process_rise_bytes: Count | None = None

    def __post_init__(self) -> None:
        if is_emulated(self.gpu) != (self.source == "emulated"):
            raise ValueError(f"source: figures of {self.gpu} are {origin_of(self.gpu)}, not {self.source}")

    @property
    def rise_bytes(self) -> int | None:
        """Return the GPU memory a process gained from before its first tensor to its peak, or None.

        It is None if the record has neither this difference nor both levels.
        """
        if self.process_rise_bytes is not None:
            return self.process_rise_bytes
        if self.process_peak_bytes is None or self.context_before_bytes is None:
            return None
        return self.process_peak_bytes - self.context_before_bytes

    @property
    def is_unconstrained(self) -> bool:
        """Return whether no limit affected the run: no failure, no retries and no cap."""
        return not self.oom and not self.retries and self.settings.allocator_cap_bytes is None


class Point(Struct, frozen=True):
    """A run and the reserved peak of its replay."""

    observation: Observation
    replayed_bytes: int  # peak reserved of the replay without a limit


class Fit(Struct, frozen=True, forbid_unknown_fields=True):
    """The line fitted to a calibration's points, with the spread of the points."""

    overhead_bytes: Annotated[int, Meta(ge=-LARGEST, le=LARGEST)]
    slope: Annotated[float, Meta(ge=0.01, le=100)]
    spread_bytes: Count  # one standard deviation of residuals, combined with the scatter of published runs
    points: Annotated[int, Meta(ge=3, le=LARGEST)]
    center_bytes: Count  # mean of the replayed peaks
    width_bytes: Positive  # root of the sum of their squared distances from the mean
    highest_leverage: Annotated[float, Meta(ge=0, le=1)]  # 1: the line hangs on one point
    outliers: tuple[Positive, ...]  # batch sizes more than three spreads off the line

    def peak_bytes(self, replayed_bytes: int) -> int:
        """Return the predicted peak, `overhead_bytes + slope * replayed_bytes`."""
        return round(self.overhead_bytes + self.slope * replayed_bytes)

    def leverage(self, replayed_bytes: int) -> float:
        """Return the leverage of a replayed peak: 1 / `points` at `center_bytes`, and larger elsewhere."""
        return 1 / self.points + ((replayed_bytes - self.center_bytes) / self.width_bytes) ** 2

    def bound_bytes(self, replayed_bytes: int, confidence: float) -> int:
        """Return the one-sided upper prediction bound of a peak, by Student's t distribution."""
        from scipy.special import stdtrit  # takes 60 ms to import, only if there is a calibration

        # Two degrees of freedom are lost to the line, and two more are in the spread.
        deviations = float(stdtrit(self.points, confidence))
        margin = deviations * self.spread_bytes * sqrt(1 + self.leverage(replayed_bytes))
        return self.peak_bytes(replayed_bytes) + round(margin)


class NoFit(Struct, frozen=True, forbid_unknown_fields=True, rename={"reason": "refused"}):
    """The reason why a calibration's points support no line."""

    reason: Text


class Key(Struct, frozen=True):
    """The job, GPU, versions and settings for which a calibration is valid. Each key has one file."""

    job: Job
    gpu: str
    versions: Versions
    settings: Settings


class Calibration(Struct, frozen=True):
    """The runs of one job on one GPU and the line through them."""

    key: Key
    source: Origin
    about: str  # the origin of the figures, one sentence
    when: str  # the day of the last run, ISO 8601
    traced_with: str  # the version of torch under which the replayed peaks were traced
    includes_context: bool  # whether the overhead includes the CUDA context, or only memory beyond it
    points: tuple[Point, ...]
    fit: Fit | NoFit

    @property
    def contexts(self) -> list[int]:
        """Return the known sizes of the runs' CUDA contexts in bytes; none are known for emulated runs."""
        if self.source == "emulated":
            return []
        sizes = (point.observation.context_after_bytes for point in self.points)
        return [size_bytes for size_bytes in sizes if size_bytes is not None]

    def describe(self) -> str:
        """Return a phrase for a calibration, with its job, GPU, version of torch and source."""
        job, gpu, torch = self.key.job, self.key.gpu, self.key.versions.torch
        model = job.model.origin
        return f"{model} with {job.loop.optimizer} on {gpu}, torch {torch}, {self.source}"


def fitted_peak_bytes(observation: Observation, with_context: bool) -> int | None:
    """Return the measured peak in bytes to which a line is fitted, or None if the peak is unknown.

    It is the process's peak if `with_context`, else the process's rise.
    """
    return observation.process_peak_bytes if with_context else observation.rise_bytes


def includes_context(points: Iterable[Point]) -> bool:
    """Return whether the process's peak, context included, is known for all unconstrained runs.

    Emulated runs have no context, so the result is False if one of the runs is emulated. It is also False if
    there are no unconstrained runs.
    """
    runs = [point.observation for point in points if point.observation.is_unconstrained]
    return bool(runs) and all(run.process_peak_bytes is not None and run.source != "emulated" for run in runs)
