"""Observations: the measurements of one run of a job on a GPU, which probes make and calibrations hold.

A figure that was not measured is None, never 0. A run on an emulated GPU is never called measured: its
source is `emulated`, in every record.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, Struct

from planner._support.conversion import Count, Positive, Text
from planner.hardware.database import is_emulated

if TYPE_CHECKING:
    from planner.jobs import Job
else:
    Job = Any  # msgspec takes a job as it is: `planner.jobs.job_from_json` reads it

Origin = Literal["measured", "published", "emulated"]
_Level = Annotated[int, Meta(ge=0, le=99)]


def origin_of(gpu: str) -> Origin:
    """Return the origin of figures that were taken on a GPU, by its name."""
    return "emulated" if is_emulated(gpu) else "measured"


class Versions(Struct, frozen=True, forbid_unknown_fields=True):
    """The software and hardware of a run; None where the record does not tell."""

    torch: Text  # as `torch.__version__` says it: "2.6.0+cu124"
    cuda: Text | None  # `torch.version.cuda`: "12.4"
    cudnn: Text | None  # "9.1.0"
    driver: Text | None  # "550.54.15"
    capability: tuple[_Level, _Level]  # compute capability: (8, 6)
    torch_total_bytes: Count | None  # the GPU's memory as `torch.cuda.get_device_properties` gives it
    nvml_total_bytes: Count | None  # the GPU's memory as nvidia-smi shows it


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """The settings of the process that change its memory and are no part of its job."""

    matmul_tf32: bool = False  # `torch.backends.cuda.matmul.allow_tf32`
    cudnn_tf32: bool = True  # `torch.backends.cudnn.allow_tf32`
    alloc_conf: str = ""  # the text of PYTORCH_ALLOC_CONF
    allocator_cap_bytes: Count | None = None  # as `set_per_process_memory_fraction` bounds the allocator


class Observation(Struct, frozen=True, forbid_unknown_fields=True):
    """One job at one batch size, run for several steps in a fresh process.

    Raises ValueError for an emulated GPU's figures that are called anything else, and the reverse.
    """

    job: Job
    batch: Positive
    gpu: Text  # as torch names it: "NVIDIA GeForce RTX 3060"
    versions: Versions
    settings: Settings
    oom: bool  # the run died of want of memory; the peaks are those until then
    source: Origin
    about: str  # published: whose figures, from which file; measured: "" or a remark
    when: Text  # the day of the run, ISO 8601: "2025-05-06"
    peak_allocated_bytes: Count | None = None  # torch's `max_memory_allocated`
    peak_reserved_bytes: Count | None = None  # torch's `max_memory_reserved`
    end_allocated_bytes: Count | None = None  # after the last step
    process_peak_bytes: Count | None = None  # NVML's, with the context
    context_before_bytes: int | None = None  # NVML's level before the first tensor
    context_after_bytes: int | None = None  # NVML's level after the third step less what torch has reserved
    retries: Count | None = None  # how often the allocator released cached segments to go on
    # The process's peak over its level before the first tensor, where a record has only this difference; None
    # where both ends are known and stand above.
    process_rise_bytes: Count | None = None

    def __post_init__(self) -> None:
        if is_emulated(self.gpu) != (self.source == "emulated"):
            raise ValueError(f"source: figures of {self.gpu} are {origin_of(self.gpu)}, not {self.source}")

    @property
    def rise_bytes(self) -> int | None:
        """Return the process's peak over its level before the first tensor: what it reserved and loaded."""
        if self.process_rise_bytes is not None:
            return self.process_rise_bytes
        if self.process_peak_bytes is None or self.context_before_bytes is None:
            return None
        return self.process_peak_bytes - self.context_before_bytes

    @property
    def is_unconstrained(self) -> bool:
        """Return whether nothing bounded the run, so that its peak is its own."""
        return not self.oom and not self.retries and self.settings.allocator_cap_bytes is None
