"""Records of a command's processes on emulated GPUs: memory peaks, steps and how they ended.

There is one record for each process and GPU.
"""

from collections.abc import Sequence
from pathlib import Path, PurePath
from struct import unpack

import msgspec
from msgspec import Struct

from planner._support.processes import signal_name
from planner.emulator.history import ProcessHistory
from planner.errors import DataFileError
from planner.program import Outcome


class GpuPeaks(Struct, frozen=True):
    """The peaks of memory on one GPU in a span of time."""

    allocated_bytes: int
    reserved_bytes: int
    process_bytes: int  # context and everything reserved, as nvidia-smi shows it


class StepPeaks(Struct, frozen=True):
    """A range of consecutive optimizer steps, and their memory peaks."""

    first: int
    last: int
    peaks: GpuPeaks


class OtherProcess(Struct, frozen=True):
    """Another process of the command on the GPU of a failed allocation."""

    rank: int
    process_bytes: int


def program_name(command: Sequence[str]) -> str:
    """Return the name of a command's first Python file, or else of its program, without folders."""
    return PurePath(next((word for word in command if word.endswith(".py")), command[0])).name


class OutOfMemory(Struct, frozen=True):
    """A failed allocation, with its place in the script and its effect."""

    step: int  # number of the optimizer step that would have ended next, from 1
    # "backward", "optimizer", "loading", "between steps", "evaluation"; empty elsewhere, as in forward passes
    phase: str
    module: str  # dotted name, empty if no module was running
    line: str  # FILE:LINE of the script, empty if the script was not on the stack
    requested_bytes: int
    was_raised: bool  # whether the failure ended the process
    others: tuple[OtherProcess, ...] = ()  # on the same GPU when the allocation failed
    # Whether an exception told the script. A convolution that takes another algorithm tells nobody.
    reached_script: bool = False


class GpuRecord(Struct, frozen=True):
    """The record of one process on one GPU: its peaks, its steps and how it ended."""

    rank: int
    pid: int
    device: int  # index among the GPUs that the process sees
    gpu_index: int  # index among all GPUs
    steps: tuple[StepPeaks, ...]
    after_steps: GpuPeaks | None  # peaks after the last optimizer step; None if the process was killed
    retries: int
    pinned_bytes: int
    failure: (
        OutOfMemory | None
    )  # the last failed allocation that the script met, else the last, if on this GPU
    versions: tuple[tuple[str, str], ...]  # of torch, CUDA and cuDNN
    step_count: int
    was_stopped: bool  # whether --stop-after or the step after an evaluation ended the script
    first_line: str = ""  # FILE:LINE of the script that made the process use the GPU, empty if unknown
    raised: bool = False  # whether an exception ended the script
    merged_from: int | None = None  # first step of the last row, if the row merges steps with different peaks
    # The peaks of phases, which are also counted in the steps.
    loading: GpuPeaks | None = None  # until the first module runs
    evaluation: GpuPeaks | None = None  # of all evaluations
    between_steps: GpuPeaks | None = None  # from the end of a step until the next module runs
    evaluated_before_step: int | None = None  # the step after the first evaluation, if the run stops there

    @property
    def is_whole(self) -> bool:
        """Return whether the script ended without an exception and without being killed."""
        return self.after_steps is not None and not self.raised

    @property
    def peak(self) -> GpuPeaks:
        """Return the peaks of the whole process."""
        every = [*(step.peaks for step in self.steps), *filter(None, [self.after_steps])]
        return GpuPeaks(
            max((one.allocated_bytes for one in every), default=0),
            max((one.reserved_bytes for one in every), default=0),
            max((one.process_bytes for one in every), default=0),
        )


class SharedGpu(Struct, frozen=True):
    """A GPU on which several processes of a command had memory."""

    index: int
    ranks: tuple[int, ...]
    process_bytes: int  # the most bytes that all processes together had at the same time


class EmulatedRun(Struct, frozen=True):
    """A command's run on emulated GPUs: its exit code, and a record for each process and GPU."""

    gpu: str
    gpu_count: int
    command: tuple[str, ...]
    exit_code: int
    records: tuple[GpuRecord, ...]  # at least one
    seconds: float
    assumptions: tuple[str, ...]
    histories: tuple[ProcessHistory, ...] = ()  # of each process and GPU; empty unless requested
    gpu_peaks: tuple[int, ...] = ()  # for each GPU, the most bytes of all processes at the same time

    @property
    def largest(self) -> GpuRecord:
        """Return the record with the highest peak of process memory.

        Of equal peaks, the record of the lowest rank is returned.
        """
        return max(self.records, key=lambda record: (record.peak.process_bytes, -record.rank))

    @property
    def shared_gpus(self) -> tuple[SharedGpu, ...]:
        """Return the GPUs on which several processes of the command have a record."""
        shared = []
        for index, peak_bytes in enumerate(self.gpu_peaks):
            ranks = [record.rank for record in self.records if record.gpu_index == index]
            if len(ranks) > 1:
                shared.append(SharedGpu(index, tuple(ranks), peak_bytes))
        return tuple(shared)

    @property
    def failure(self) -> OutOfMemory | None:
        """Return a failed allocation, or None if the command succeeded or no allocation failed.

        If several processes have a failed allocation, one that ended its process is preferred.
        """
        failed = [record.failure for record in self.records if record.failure is not None]
        if not self.exit_code or not failed:
            return None
        return next((one for one in failed if one.was_raised), failed[0])

    @property
    def caught(self) -> OutOfMemory | None:
        """Return a failed allocation whose exception the script caught, or None if the command failed."""
        failed = (record.failure for record in self.records if record.failure is not None)
        return None if self.exit_code else next((one for one in failed if one.reached_script), None)

    @property
    def signal(self) -> str:
        """Return the name of the signal that ended the command, or "" if no signal did.

        A shell reports a signal that ended its command as exit code 128 plus the signal's number.
        """
        return signal_name(-self.exit_code if self.exit_code < 0 else self.exit_code - 128)

    @property
    def ending(self) -> str:
        """Return a phrase that says by which signal or exit code the command ended."""
        if self.signal and self.exit_code < 0:
            return f"it was ended by {self.signal}"
        means = f", as a shell reports {self.signal}" if self.signal else ""
        return f"it ended with exit code {self.exit_code}{means}"

    @property
    def crash(self) -> str:
        """Return the signal or exit code of a crash after the command's scripts had ended, or "" without one.

        Threads that outlive the script may abort a process while its interpreter is finalized. Launchers of
        several ranks report the signal of one rank as exit code 1.
        """
        if not self.records or not all(record.is_whole for record in self.records):
            return ""
        is_of_launcher = self.exit_code == 1 and len(self.records) > 1
        return "exit code 1 of its launcher" if is_of_launcher else self.signal

    @property
    def outcome(self) -> Outcome:
        """Return whether the command fits the GPU and, if it fits, whether the allocator retried."""
        if self.failure is not None:
            return Outcome.DOES_NOT_FIT
        return Outcome.FITS_WITH_RETRIES if any(record.retries for record in self.records) else Outcome.FITS


def read_gpu_peaks(folder: Path, gpu_count: int) -> tuple[int, ...]:
    """Return the peak bytes of all processes together on each GPU, or () if no process took memory.

    csrc/shared_memory.c writes the file `gpus` that is read.
    """
    path = folder / "gpus"
    if not path.is_file():
        return ()
    with path.open("rb") as file:
        return unpack(f"={gpu_count}Q", file.read(8 * gpu_count))


def read_records(folder: Path) -> tuple[GpuRecord, ...]:
    """Return the records in a folder, sorted by rank, process and GPU.

    Raises DataFileError for a broken file.
    """
    records: list[GpuRecord] = []
    for path in sorted(folder.glob("*.json")):
        try:
            records += msgspec.json.decode(path.read_bytes(), type=tuple[GpuRecord, ...])
        except (OSError, ValueError) as error:
            raise DataFileError(f"{path}: not a record of an emulated run; run the command again") from error
    return tuple(sorted(records, key=lambda record: (record.rank, record.pid, record.device)))
