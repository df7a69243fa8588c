"""Find the largest batch size at which a command runs to its first evaluation, its end, or a given step."""

from collections.abc import Mapping, Sequence
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
from planner.planning.command.by_runs import search_whole
from planner.planning.command.command_runs import PLACEHOLDER, CommandRuns
from planner.planning.search.boundary import Search
from planner.program import LARGEST_BATCH, OnProgress, Outcome

STEPS = 3  # optimizer steps of each run: the first makes the optimizer's state


class CommandPlan(Struct, frozen=True):
    """The largest batch sizes of a command with and without retries, and the runs at and above them."""

    command: tuple[str, ...]
    gpu: str
    gpu_count: int
    confidence: float
    search: Search
    at_max: EmulatedRun | None  # None if no batch size fits
    at_comfortable: EmulatedRun | None  # None if no batch size fits without retries
    first_failure: EmulatedRun | None  # None if every batch size fits
    replayed: tuple[int, ...]  # batch sizes whose histories were aligned; empty if runs alone gave the answer
    confirmed: tuple[tuple[int, Outcome], ...]  # batch sizes that ran on the GPU, and their outcomes
    covered: str  # text that says which part of the command ran at the answer; empty if there is no answer
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
    """Find the largest batch sizes at which a command fits, with and without retries.

    The command runs on emulated GPUs. Histories at two batch sizes are aligned and replayed; runs confirm the
    answers and their successors. If histories do not align, runs alone lead to the answer. The answers run to
    the end of the first evaluation, or of the script, unless `options.stop_after` ends all runs before.
    A batch size does not fit if the script meets an out-of-memory error, even if it catches the error.
    `{batch}` stands for the batch size in at least one of the command's words; only multiples of
    `multiple_of` are tried. The CUDA context is taken at its upper bound for `confidence`; the rest is
    emulated. Raises the errors of `run_emulated`, and UsageError for a command without `{batch}`.
    """
    if not any(PLACEHOLDER in word for word in command):
        raise UsageError(
            f"the command has no {PLACEHOLDER}: write it in place of the batch size, such as "
            f"`-- python train.py --batch-size {PLACEHOLDER}`; a step or model of a file is planned with "
            "--model train.py:NAME"
        )
    start = perf_counter()
    runs = CommandRuns(tuple(command), _cautious(options, confidence), cache, on_progress)
    whole = CommandRuns(tuple(command), _to_evaluation(runs.options), cache, on_progress)
    goes_on = options.stop_after is None
    finder = BatchFinder(runs, multiple_of, whole if goes_on else None)
    search = by_steps = finder.find()
    if goes_on:
        search = search_whole(whole, runs, by_steps, multiple_of, finder.most, finder.notes)
    replayed = () if finder.fit is None or search is not by_steps else finder.fit.batches
    on_gpu = {**runs.on_gpu, **whole.on_gpu}
    failed = [batch for batch, run in on_gpu.items() if run.outcome is Outcome.DOES_NOT_FIT]
    search = replace(search, first_failure=min(failed, default=None))
    answer = _run_at(on_gpu, search.comfortable or search.largest)
    return CommandPlan(
        tuple(command),
        options.device.name,
        options.gpu_count,
        confidence,
        search,
        _run_at(on_gpu, search.largest),
        _run_at(on_gpu, search.comfortable),
        _run_at(on_gpu, search.first_failure or 0),
        replayed,
        tuple((batch, run.outcome) for batch, run in sorted(on_gpu.items())),
        "" if answer is None else _covered(answer),
        tuple(finder.notes),
        runs.count + whole.count,
        perf_counter() - start,
    )


def _run_at(on_gpu: Mapping[int, EmulatedRun], batch: int) -> EmulatedRun | None:
    """Return the cached run at a batch size, or None if there was no run.

    If the search found no limit, the run at the largest batch size tried is returned.
    """
    return on_gpu.get(max(on_gpu) if batch >= LARGEST_BATCH // 2 else batch)


def _covered(run: EmulatedRun) -> str:
    """Return text that says which part of the command a run covered."""
    record = run.largest
    count = f"{record.step_count:,} optimizer step{'s' * (record.step_count != 1)}"
    if record.evaluated_before_step is not None:
        before = record.evaluated_before_step - 1
        return (
            f"{count}, and the evaluation after step {before:,}; no later one, and no other end of the script"
        )
    return f"the first {count}: nothing after them" if record.was_stopped else f"the whole script: {count}"


def _to_evaluation(options: RunOptions) -> RunOptions:
    """Return options with which runs end after the first evaluation, or with the script if there is none."""
    return replace(options, stop_after=None, stops_after_evaluation=True, history_steps=options.stop_after)


def _cautious(options: RunOptions, confidence: float) -> RunOptions:
    """Return the options with the context's upper bound at `confidence`, few steps, and histories kept."""
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
        stops_out_of_memory=True,
        keeps_histories=True,
    )
