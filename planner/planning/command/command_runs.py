"""Run a command at a batch size, on the emulated GPU or with memory to spare."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile

from msgspec.structs import replace

from planner.emulator import EmulatedRun, RunOptions, run_emulated
from planner.errors import ModelError
from planner.hardware import Device, SourcedBytes
from planner.program import OnProgress, Outcome

PLACEHOLDER = "{batch}"  # stands for the batch size in the command
_SPARE_BYTES = 2**40  # of a GPU on which everything fits
_MOST_SPARE_BYTES = 2**42  # of all GPUs; the stand-ins reserve sixteen times as many addresses


@dataclass(slots=True)
class CommandRuns:
    """Runs of a command, cached by batch size: at most one on the GPU, and one with memory to spare."""

    command: Sequence[str]
    options: RunOptions
    cache: Path
    on_progress: OnProgress
    on_gpu: dict[int, EmulatedRun] = field(default_factory=dict)
    with_spare: dict[int, EmulatedRun] = field(default_factory=dict)
    count: int = 0  # runs of the command

    @property
    def device(self) -> Device:
        """Return the GPU that the runs emulate."""
        return self.options.device

    def outcome(self, batch: int) -> Outcome:
        """Return the outcome of a batch size on the GPU. The command is run if no run is cached."""
        if batch not in self.on_gpu:
            self.count += 1
            self.on_gpu[batch] = self.run(batch, self.options, "on the GPU")
        return self.on_gpu[batch].outcome

    def unbounded(self, batch: int) -> EmulatedRun:
        """Return a run without retries at a batch size, on the GPU or with memory to spare.

        It is the run on the GPU if this run is cached and needs no retries, else a run with memory to spare.
        """
        run = self.on_gpu.get(batch)
        if run is not None and run.outcome is Outcome.FITS:
            return run
        if batch not in self.with_spare:
            size_bytes = min(_SPARE_BYTES, _MOST_SPARE_BYTES // self.options.gpu_count)
            spare = SourcedBytes(size_bytes, "memory to spare")
            device = replace(self.options.device, total=spare, usable=spare)
            options = replace(self.options, device=device)
            self.count += 1
            self.with_spare[batch] = self.run(batch, options, "with memory to spare")
        return self.with_spare[batch]

    def reserved_bytes(self, batch: int) -> int:
        """Return the reserved peak of a run without retries at a batch size."""
        if batch not in self.with_spare:
            self.outcome(batch)  # if it fits, the run is an answer too
        return self.unbounded(batch).largest.peak.reserved_bytes

    def allocated_bytes(self, batch: int) -> int:
        """Return the bytes that a batch size needs with retries: the peak of allocated memory."""
        if batch not in self.with_spare and self.outcome(batch) is not Outcome.DOES_NOT_FIT:
            return self.on_gpu[batch].largest.peak.allocated_bytes
        return self.unbounded(batch).largest.peak.allocated_bytes

    @property
    def limit_bytes(self) -> int:
        """Return the usable bytes of the GPU minus the CUDA context."""
        return self.device.usable.value - self.device.context.value

    def run(self, batch: int, options: RunOptions, where: str) -> EmulatedRun:
        """Run the command at a batch size, and return the run. `where` is text for `on_progress`.

        Raises ModelError, which quotes the last line that the command printed.
        """
        far = " to its first evaluation (--stop-after N ends it before)" * options.stops_after_evaluation
        self.on_progress(f"running batch {batch} {where}{far}")
        words = [word.replace(PLACEHOLDER, str(batch)) for word in self.command]
        with TemporaryFile("w+", encoding="utf-8", errors="replace") as printed:
            quiet = replace(options, output=printed, errors=printed)
            try:
                return run_emulated(words, quiet, self.cache, self.on_progress)
            except ModelError as error:
                printed.seek(0)
                last_line = next((line for line in reversed(printed.read().splitlines()) if line.strip()), "")
                raise ModelError(f"{error}; at batch {batch} it printed last: {last_line[:200]}") from error
