"""Find the largest batch size of a command: each probe is a short run of it on emulated GPUs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import hypot
from pathlib import Path
from statistics import NormalDist
from tempfile import TemporaryFile
from time import perf_counter

from planner.device import MIB, Measured
from planner.emulator.launch import RunOptions, run_emulated
from planner.emulator.record import EmulatedRun
from planner.errors import ModelError, UsageError
from planner.events import Outcome
from planner.search import LARGEST_BATCH, Search, largest_by_line, round_down

PLACEHOLDER = "{batch}"  # stands for the batch size in the command
STEPS = 3  # optimizer steps of each run: the first makes the optimizer's state
_FIRST_BATCHES = (4, 8)  # through whose peaks the first line goes
_SPARE_BYTES = 2**46  # a GPU on which everything fits, to see what a batch would take

OnProgress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class CommandPlan:
    """The largest batch size of a command, and the runs around it."""

    command: tuple[str, ...]
    gpu: str
    gpu_count: int
    confidence: float
    search: Search
    at_max: EmulatedRun | None  # None where not even 1 fits
    at_comfortable: EmulatedRun | None  # without retries
    first_failure: EmulatedRun | None  # None where every batch size fits
    run_count: int
    seconds: float


def find_largest_batch(
    command: Sequence[str],
    options: RunOptions,
    confidence: float,
    multiple_of: int,
    cache: Path,
    on_progress: OnProgress,
) -> CommandPlan:
    """Find the largest batch size at which a command fits, in about six runs of a few optimizer steps each.

    `{batch}` stands for the batch size in one of the command's words or more. The context is taken as large
    as it is with this confidence; the rest is emulated. Raises the errors of `run_emulated`, UsageError for a
    command without `{batch}`.
    """
    if not any(PLACEHOLDER in word for word in command):
        raise UsageError(f"the command has no {PLACEHOLDER}: write it where the batch size stands")
    runs = _Runs(tuple(command), _cautious(options, confidence), cache, on_progress)
    device, start = runs.options.device, perf_counter()
    room_bytes = device.usable.value - device.context.value
    search = largest_by_line(runs.outcome, runs.need_bytes, room_bytes, _FIRST_BATCHES, LARGEST_BATCH)
    if multiple_of > 1:
        search = round_down(search, multiple_of, runs.outcome)
    return CommandPlan(
        tuple(command),
        options.device.name,
        options.gpu_count,
        confidence,
        search,
        runs.found.get(search.largest),
        runs.found.get(search.comfortable),
        runs.found.get(search.first_failure or 0),
        runs.count,
        perf_counter() - start,
    )


def _cautious(options: RunOptions, confidence: float) -> RunOptions:
    """Return the options with a context that is not exceeded with this probability, and few steps."""
    if not 0.5 <= confidence < 1:
        raise UsageError(f"--confidence {confidence}: give a probability from 0.5 to below 1, such as 0.99")
    device = options.device
    margin = NormalDist().inv_cdf(confidence) * hypot(device.context.spread, device.usable.spread)
    context = replace(
        device.context,
        value=round(device.context.value + margin),
        source=f"{device.context.source}; with {margin / MIB:.0f} MiB for confidence {confidence:g}",
    )
    return replace(options, device=replace(device, context=context), stop_after=options.stop_after or STEPS)


@dataclass(slots=True)
class _Runs:
    """Runs of the command: each batch size once on the GPU, and with memory to spare if it fails there."""

    command: tuple[str, ...]
    options: RunOptions
    cache: Path
    on_progress: OnProgress
    found: dict[int, EmulatedRun] = field(default_factory=dict)
    count: int = 0

    def outcome(self, batch: int) -> Outcome:
        """Run the command at this batch size and return whether it fits."""
        if batch not in self.found:
            self.found[batch] = self._run(batch, self.options)
        return self.found[batch].outcome

    def need_bytes(self, batch: int) -> int:
        """Return the peak of reserved memory at this batch size where memory does not bound it."""
        if self.outcome(batch) is Outcome.FITS:
            return self.found[batch].largest.peak.reserved_bytes
        spare = Measured(_SPARE_BYTES, "memory to spare")
        device = replace(self.options.device, total=spare, usable=spare)
        run = self._run(batch, replace(self.options, device=device))
        return run.largest.peak.reserved_bytes

    def _run(self, batch: int, options: RunOptions) -> EmulatedRun:
        self.count += 1
        self.on_progress(f"running batch {batch}")
        words = [word.replace(PLACEHOLDER, str(batch)) for word in self.command]
        with TemporaryFile("w+", encoding="utf-8", errors="replace") as printed:
            quiet = replace(options, output=printed, errors=printed)
            try:
                return run_emulated(words, quiet, self.cache, self.on_progress)
            except ModelError as error:
                printed.seek(0)
                said = next((line for line in reversed(printed.read().splitlines()) if line.strip()), "")
                raise ModelError(f"{error}; at batch {batch} it printed last: {said[:200]}") from error
