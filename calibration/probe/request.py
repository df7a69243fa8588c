"""What is asked of a probe, and the file that its answer is kept in."""

from dataclasses import dataclass
from pathlib import Path

from planner.hardware.calibration import Settings, Versions
from planner.jobs import Job


@dataclass(frozen=True, slots=True)
class Gpu:
    """The card that probes run on, as a fresh process found it."""

    name: str  # as torch names it
    versions: Versions
    settings: Settings  # those of a process that changes none


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """One job at one batch size in a fresh process."""

    job: Job
    batch: int
    allocator_cap_bytes: int | None = None  # a bound on the caching allocator alone
    alloc_conf: str = ""  # the text of PYTORCH_ALLOC_CONF
    history: Path | None = None  # where the allocator's history is written; None: it is not recorded
    device: str = "cuda"  # tests say "cpu": the same loop, no figures
