"""Find the largest batch size of a job on one GPU, and estimate its memory.

The memory of the smallest batch size that was found not to fit is estimated too.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from msgspec import Struct
from msgspec.structs import replace

from planner.hardware import (
    Budget,
    judge_budget,
)
from planner.jobs import Compile, Job
from planner.planning.epoch import EpochPrograms, max_useful_batch
from planner.planning.estimate import Estimate, Seconds, estimate_batch
from planner.planning.search.boundary import Search
from planner.planning.search.by_runs import first_run, note_on_runs
from planner.planning.search.one_gpu import search_judged
from planner.planning.search.replays import ReplayCache, TargetReplays, TimedPrograms
from planner.program import FIT_BATCHES, Outcome, ProgramSet


class Plan(Struct, frozen=True):
    """The largest batch sizes of a job on one GPU, with estimates at them and at the smallest that fails."""

    job: Job
    budget: Budget
    search: Search
    at_max: Estimate | None  # None if not even the smallest batch size that trains fits
    first_failure: Estimate | None  # None if every batch size fits, or if the failing one cannot be captured
    seconds: Seconds
    multiple_of: int = 1  # the answer had to be a multiple of this
    at_comfortable: Estimate | None = None  # None if no batch size fits without retries
    no_retries: bool = False  # whether a batch size that needs retries is no answer

    @property
    def largest_of_any_size(self) -> int:
        """Return the largest probed batch size that fits, or 0 if no size fits. `multiple_of` is ignored."""
        sizes = (batch for batch, outcome in self.search.probes if outcome is not Outcome.DOES_NOT_FIT)
        return max(sizes, default=0)

    @property
    def comfortable_of_any_size(self) -> int:
        """Return the largest probed batch size that fits without retries, or 0. `multiple_of` is ignored."""
        return max((batch for batch, outcome in self.search.probes if outcome is Outcome.FITS), default=0)

    @property
    def answer(self) -> Estimate | None:
        """Return the estimate that a report shows first, or None if no batch size is an answer.

        It is the estimate of the largest batch size without retries. If there is none, it is the estimate of
        the largest batch size with retries, unless `no_retries`.
        """
        return self.at_comfortable if self.no_retries else self.at_comfortable or self.at_max

    @property
    def with_retries(self) -> Estimate | None:
        """Return the estimate of the largest batch size if it needs retries, else None."""
        return self.at_max if self.search.comfortable < self.search.largest else None


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """Raise Python's garbage collection thresholds inside the context, and restore them on exit.

    Traces and replays create millions of objects and little garbage, and repeated passes over all of torch's
    objects take a fifth of a plan's time.
    """
    before = gc.get_threshold()
    gc.set_threshold(100_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@collecting_rarely()
def find_max_batch(job: Job, budget: Budget, programs: ProgramSet, multiple_of: int = 1) -> Plan:
    """Find the largest batch sizes that fit the budget, with and without retries, and estimate their memory.

    The plan also has the estimate at the smallest batch size that was found not to fit. The largest batch
    sizes are multiples of `multiple_of`. Raises the errors of a capture.
    """
    start = perf_counter()
    timed, target = TimedPrograms(programs), budget.device.target
    is_program = timed.bound(target) is not None  # builds the program that the next trace instantiates
    is_compiled = job.model.compile is not Compile.NONE
    small = timed.batch_sizes(target).floor(FIT_BATCHES[0] if is_program else first_run(is_compiled))
    budget = judge_budget(budget, job, timed.trace(small, target))
    epochs = EpochPrograms(job, timed)
    replays = TargetReplays(
        ReplayCache(epochs), target, epochs.bound(target), max_useful_batch(job), is_compiled
    )
    search, budget = search_judged(job, replays, budget, multiple_of)
    too_large = replays.too_large

    def at(batch: int) -> Estimate:
        result = estimate_batch(job, epochs.trace(batch, target), budget, timed.seconds)
        notes: tuple[str, ...] = () if is_program else (note_on_runs(search, is_compiled),)
        return replace(result, notes=(*result.notes, *notes, *_notes_on_refusals(replays)))

    at_max = at(search.largest) if search.largest else None
    at_comfortable = at_max if search.comfortable == search.largest else None
    if at_comfortable is None and search.comfortable:
        at_comfortable = at(search.comfortable)
    failure = search.first_failure if search.first_failure not in too_large else None
    first_failure = at(failure) if failure else None
    seconds = Seconds(timed.seconds, perf_counter() - start - timed.seconds)
    return Plan(job, budget, search, at_max, first_failure, seconds, multiple_of, at_comfortable)


def _notes_on_refusals(replays: TargetReplays) -> Iterator[str]:
    """Yield notes on the batch sizes that cannot be captured, with the reasons."""
    if replays.too_small:
        reason = replays.too_small[max(replays.too_small)].rpartition("; ")[0]  # without its remedy
        yield f"batch sizes are tried from {replays.least} on: {reason}"
    if replays.too_large:
        least = min(replays.too_large)
        yield f"batch sizes from {least} on are not planned: {replays.too_large[least]}"
