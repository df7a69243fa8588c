"""What one run of a job on a GPU showed: the noun that probes make, fits read and calibration files keep.

No algorithm stands here. A figure that was not seen is None, never 0. What ran on an emulated GPU is never
called measured: its origin is `emulated`, in every record.
"""

from dataclasses import dataclass
from typing import Literal

from planner.hardware.database import is_emulated
from planner.jobs import Job

Origin = Literal["measured", "published", "emulated"]


def origin_of(gpu: str) -> Origin:
    """Return the origin of figures that were taken on a GPU, by its name."""
    return "emulated" if is_emulated(gpu) else "measured"


@dataclass(frozen=True, slots=True)
class Versions:
    """What the figures of a run depend on besides the job; None where the record does not tell."""

    torch: str  # as `torch.__version__` says it: "2.6.0+cu124"
    cuda: str | None  # `torch.version.cuda`: "12.4"
    cudnn: str | None  # "9.1.0"
    driver: str | None  # "550.54.15"
    capability: tuple[int, int]  # compute capability: (8, 6)
    torch_total_bytes: int | None  # the card's memory as `torch.cuda.get_device_properties` gives it
    nvml_total_bytes: int | None  # the card's memory as nvidia-smi shows it


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of the process that change its memory and are no part of its job."""

    matmul_tf32: bool = False  # `torch.backends.cuda.matmul.allow_tf32`
    cudnn_tf32: bool = True  # `torch.backends.cudnn.allow_tf32`
    alloc_conf: str = ""  # the text of PYTORCH_ALLOC_CONF
    allocator_cap_bytes: int | None = None  # as `set_per_process_memory_fraction` bounds the allocator


@dataclass(frozen=True, slots=True)
class Observation:
    """One job at one batch size, run for several steps in a fresh process.

    Raises ValueError for an emulated GPU's figures that are called anything else, and the reverse.
    """

    job: Job
    batch: int
    gpu: str  # as torch names it: "NVIDIA GeForce RTX 3060"
    versions: Versions
    settings: Settings
    peak_allocated_bytes: int | None  # torch's `max_memory_allocated`
    peak_reserved_bytes: int | None  # torch's `max_memory_reserved`
    end_allocated_bytes: int | None  # after the last step
    process_peak_bytes: int | None  # NVML's, with the context; None where the process is not visible there
    context_before_bytes: int | None  # NVML's level before the first tensor
    context_after_bytes: int | None  # NVML's level after the third step less what torch has reserved then
    retries: int | None  # how often the allocator released cached segments to go on
    oom: bool  # the run died of want of memory; the peaks are those until then
    source: Origin
    about: str  # published: whose figures, from which file; measured: "" or a remark
    when: str  # the day of the run, ISO 8601: "2025-05-06"
    process_rise_bytes: int | None = None  # the process's peak over its level before the first tensor, where
    # a record knows only this difference; where both ends are known they stand above and this is None

    def __post_init__(self) -> None:
        if is_emulated(self.gpu) != (self.source == "emulated"):
            raise ValueError(f"source: figures of {self.gpu} are {origin_of(self.gpu)}, not {self.source}")

    @property
    def rise_bytes(self) -> int | None:
        """The process's peak over its level before the first tensor: reserved and lazily loaded memory."""
        if self.process_rise_bytes is not None:
            return self.process_rise_bytes
        if self.process_peak_bytes is None or self.context_before_bytes is None:
            return None
        return self.process_peak_bytes - self.context_before_bytes
