"""Find the largest batch size of a command by replay of its allocator's history, confirmed by runs."""

from collections.abc import Sequence
from math import hypot
from pathlib import Path
from statistics import NormalDist
from time import perf_counter

from msgspec import Struct
from msgspec.structs import replace

from planner.emulator import EmulatedRun, RunOptions
from planner.errors import UsageError
from planner.hardware import MIB, check_confidence
from planner.planning.command.batch_finder import BatchFinder
from planner.planning.command.command_runs import PLACEHOLDER, CommandRuns
from planner.planning.search import Search
from planner.program import LARGEST_BATCH, OnProgress, Outcome

STEPS = 3  # optimizer steps of each run: the first makes the optimizer's state


class CommandPlan(Struct, frozen=True):
    """The largest batch size of a command, and the runs around it."""

    command: tuple[str, ...]
    gpu: str
    gpu_count: int
    confidence: float
    search: Search
    at_max: EmulatedRun | None  # None where not even 1 fits
    at_comfortable: EmulatedRun | None  # without retries
    first_failure: EmulatedRun | None  # None where every batch size fits
    replayed: tuple[int, ...]  # batch sizes whose histories were aligned; none where only runs answer
    confirmed: tuple[tuple[int, Outcome], ...]  # runs on the GPU
    notes: tuple[str, ...]
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

    Histories at two batch sizes are aligned and replayed; runs confirm the answers and their successors.
    Where histories do not align, runs alone lead to the answer. `{batch}` stands for the batch size in one of
    the command's words or more; only multiples of `multiple_of` are looked at. The context is taken as large
    as it is with this confidence; the rest is emulated. Raises the errors of `run_emulated`, UsageError for a
    command without `{batch}`.
    """
    if not any(PLACEHOLDER in word for word in command):
        raise UsageError(
            f"the command has no {PLACEHOLDER}: write it where the batch size stands, such as "
            f"`-- python train.py --batch-size {PLACEHOLDER}`; a step or model of a file is planned with "
            "--model train.py:NAME"
        )
    start = perf_counter()
    runs = CommandRuns(tuple(command), _cautious(options, confidence), cache, on_progress)
    finder = BatchFinder(runs, multiple_of)
    search = finder.find()
    failed = [batch for batch, run in runs.on_gpu.items() if run.outcome is Outcome.DOES_NOT_FIT]
    search = replace(search, first_failure=min(failed, default=None))
    return CommandPlan(
        tuple(command),
        options.device.name,
        options.gpu_count,
        confidence,
        search,
        _run_at(runs, search.largest),
        _run_at(runs, search.comfortable),
        _run_at(runs, search.first_failure or 0),
        () if finder.fit is None else finder.fit.batches,
        tuple((batch, run.outcome) for batch, run in sorted(runs.on_gpu.items())),
        tuple(finder.notes),
        runs.count,
        perf_counter() - start,
    )


def _run_at(runs: CommandRuns, batch: int) -> EmulatedRun | None:
    """Return the run at a batch size, or the largest that ran where the search has no end."""
    return runs.on_gpu.get(max(runs.on_gpu) if batch >= LARGEST_BATCH // 2 else batch)


def _cautious(options: RunOptions, confidence: float) -> RunOptions:
    """Return the options with a context that is not exceeded with this probability, and few steps."""
    device = options.device
    margin = NormalDist().inv_cdf(check_confidence(confidence)) * hypot(
        device.context.spread, device.usable.spread
    )
    context = replace(
        device.context,
        value=round(device.context.value + margin),
        source=f"{device.context.source}; with {margin / MIB:.0f} MiB for confidence {confidence:g}",
    )
    return replace(
        options,
        device=replace(device, context=context),
        stop_after=options.stop_after or STEPS,
        keeps_histories=True,
    )
