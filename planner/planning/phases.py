"""Tell the phases of a job, from loading the model to saving a checkpoint, with the peaks of each."""

from collections.abc import Iterator
from enum import StrEnum

from msgspec import Struct

from planner.allocator import PhasePeak, Replay, highest
from planner.jobs import Job, Mode, Quantize
from planner.program import Phase


class JobPhase(StrEnum):
    """A part of a job, in the order in which a script usually comes to it."""

    LOADING = "loading"  # the model is placed on the GPU
    FIRST_STEP = "first_step"  # gradients and optimizer state are allocated
    LATER_STEPS = "later_steps"
    EVALUATION = "evaluation"
    SAVING = "saving"  # of a checkpoint between two steps
    RESUMING = "resuming"  # from a checkpoint


class JobPhasePeak(Struct, frozen=True):
    """The peaks of a phase in bytes, memory from before it included; None if the phase is not planned."""

    phase: JobPhase
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None

    @property
    def is_planned(self) -> bool:
        """Return whether the phase is planned."""
        return self.allocated_bytes is not None


def job_phases(job: Job, run: Replay) -> tuple[JobPhasePeak, ...]:
    """Return the phases of a job with their peaks in a run; those of training alone if the job trains.

    `torch.save` copies each storage to the CPU by itself (torch/serialization.py), so saving takes what is
    allocated between two steps. This is planned for whole weights on one GPU: the libraries that hold shards
    or quantized weights build other tensors to save. Resuming is not planned, since it depends on where a
    script loads its checkpoint.
    """
    parts: dict[JobPhase, list[PhasePeak]] = {}
    for phase, peak in _phases(run):
        parts.setdefault(phase, []).append(peak)
    if not _saves_whole_weights(job):
        parts.pop(JobPhase.SAVING, None)
    steps = (JobPhase.LOADING, JobPhase.FIRST_STEP, JobPhase.LATER_STEPS)
    return tuple(
        _peak_of(phase, parts.get(phase, []))
        for phase in JobPhase
        if phase in parts or _trains(job) and phase not in steps
    )


def _phases(run: Replay) -> Iterator[tuple[JobPhase, PhasePeak]]:
    """Yield the peaks of a run with the phase of the job that each belongs to."""
    following = (*run.phase_peaks[1:], None)
    for peak, after in zip(run.phase_peaks, following, strict=True):
        loads_evaluated = peak.phase is Phase.INPUTS and after is not None and after.phase is Phase.EVALUATION
        if peak.phase is Phase.EVALUATION or loads_evaluated:
            yield JobPhase.EVALUATION, peak
        elif peak.phase is Phase.SETUP:
            yield JobPhase.LOADING, peak
        elif peak.phase is Phase.END:
            yield JobPhase.SAVING, peak
        else:
            yield JobPhase.FIRST_STEP if peak.step == 1 else JobPhase.LATER_STEPS, peak


def _peak_of(phase: JobPhase, parts: list[PhasePeak]) -> JobPhasePeak:
    if not parts:
        return JobPhasePeak(phase)
    peaks = highest(parts)
    return JobPhasePeak(phase, peaks.allocated_bytes, peaks.reserved_bytes)


def _trains(job: Job) -> bool:
    return job.mode in (Mode.TRAIN, Mode.STEP)


def _saves_whole_weights(job: Job) -> bool:
    is_sharded = bool(job.fsdp or job.tp or job.world_size or job.deepspeed)
    return _trains(job) and not is_sharded and job.quantize is Quantize.NONE
