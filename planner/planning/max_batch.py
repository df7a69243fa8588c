"""The one orchestrator: job and card in, the answer and all that led to it out. The tracer is passed in."""

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter

from planner.allocator import UNLIMITED, Arena, Replay, replay_trace, replay_with_breakdown, room_bytes
from planner.errors import BatchTooLargeError, ModelError
from planner.hardware import (
    Budget,
    estimate_oom_probability,
    judge_budget,
    process_bytes,
    upper_process_bytes,
)
from planner.jobs import Job
from planner.planning.epoch import last_batch, most_batch, over_epoch
from planner.planning.growth_limit import StepLimit, find_step_limit
from planner.planning.retry_cost import RetryCost, count_retries
from planner.planning.search import Search, boundary_near, largest, largest_by_line, round_down
from planner.program import (
    FROM_CHANCE,
    RANDOM_COURSE,
    Category,
    Growth,
    Outcome,
    Trace,
    align,
    find_growth,
    least_bytes,
    refit,
)

FIT_BATCHES = (
    2,
    3,
)  # at batch 1 broadcasting and contiguity take shortcuts, so it is no end of a straight line

MOST_REFITS = 6  # after which each batch size near the last answer is traced by itself

TraceSource = Callable[[int], Trace]  # the job's trace at a batch size
OnProgress = Callable[[str], None]  # hears one short line for each thing that takes time


@dataclass(frozen=True, slots=True)
class Seconds:
    """Where the time went."""

    trace: float
    replay: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """The memory of one batch size on one card."""

    job: Job
    budget: Budget
    outcome: Outcome
    run: Replay  # under the budget where the batch fits; of a card without end where it does not
    failed: Replay | None  # the failing run under the budget where the batch does not fit
    at_peak: Mapping[Category, int]  # bytes by role at the allocated peak; they add up to it
    process_bytes: int  # context and reserved peak, calibrated where that is known: what nvidia-smi shows
    process_upper_bytes: int  # the same at the confidence
    unknown_ops: tuple[str, ...]
    notes: tuple[str, ...]
    seconds: Seconds
    p_out_of_memory: float | None = None  # by the residuals of published runs; None where nothing bounds it
    growth: Growth | None = None  # what each step leaves behind
    step_limit: StepLimit | None = None  # the steps that fit in spite of it; None where memory has no end
    retry_costs: tuple[RetryCost, ...] = ()  # of each step, where the batch fits with retries alone


@dataclass(frozen=True, slots=True)
class Plan:
    """The largest batch size, and the estimates on both sides of it."""

    job: Job
    budget: Budget
    search: Search
    at_max: Estimate | None  # None where not even 1 fits
    first_failure: Estimate | None  # None where every batch size fits
    seconds: Seconds
    multiple_of: int = 1  # that the answer had to be
    at_comfortable: Estimate | None = None  # None where none fits without retries
    no_retries: bool = False  # a batch size that needs retries is no answer

    @property
    def largest_of_any_size(self) -> int:
        """The largest batch size that was found to fit, a multiple or not."""
        sizes = (batch for batch, outcome in self.search.probes if outcome is not Outcome.DOES_NOT_FIT)
        return max(sizes, default=0)

    @property
    def comfortable_of_any_size(self) -> int:
        """The largest batch size that was found to run without retries, a multiple or not."""
        return max((batch for batch, outcome in self.search.probes if outcome is Outcome.FITS), default=0)

    @property
    def answer(self) -> Estimate | None:
        """The estimate that a report leads with: the largest batch size that runs at full speed; where none
        does, and one with retries is an answer, the largest of those.
        """
        return self.at_comfortable if self.no_retries else self.at_comfortable or self.at_max

    @property
    def with_retries(self) -> Estimate | None:
        """That of a larger batch size, which fits with retries alone."""
        return self.at_max if self.search.comfortable < self.search.largest else None


def estimate(job: Job, trace: Trace, batch: int, budget: Budget, trace_seconds: float = 0.0) -> Estimate:
    """Replay one batch size of a trace under the budget and say where the memory goes."""
    start = perf_counter()
    budget = judge_budget(budget, job, trace)
    run, at_peak = replay_with_breakdown(trace, batch, budget.arena)
    failed = None
    if run.outcome is Outcome.DOES_NOT_FIT:
        failed = run
        run, at_peak = replay_with_breakdown(trace, batch, without_end(budget.arena))
    chance = estimate_oom_probability(budget, trace, run)
    growth = find_growth(trace, batch)
    limit = None
    if growth is not None and failed is None:
        limit = find_step_limit(trace, batch, budget.arena, growth, run.peak_reserved_bytes)
    retries = run.outcome is Outcome.FITS_WITH_RETRIES and failed is None
    costs = count_retries(trace, batch, budget.arena) if retries else ()
    return Estimate(
        job,
        budget,
        Outcome.DOES_NOT_FIT if failed else run.outcome,
        run,
        failed,
        at_peak,
        process_bytes(budget, run.peak_reserved_bytes),
        upper_process_bytes(budget, run.peak_reserved_bytes),
        trace.unknown_ops,
        trace.notes,
        Seconds(trace_seconds, perf_counter() - start),
        chance,
        growth,
        limit,
        costs,
    )


def without_end(arena: Arena) -> Arena:
    """An arena with the same rules and memory that never runs out."""
    return replace(UNLIMITED, rules=replace(arena.rules, per_process_memory_fraction=1.0))


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """Traces and replays make objects by the million and little garbage: looking through all of torch's
    objects for it again and again takes a fifth of a plan.
    """
    before = gc.get_threshold()
    gc.set_threshold(100_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@collecting_rarely()
def plan_max_batch(
    job: Job, budget: Budget, tracer: TraceSource, tell: OnProgress = lambda line: None, multiple_of: int = 1
) -> Plan:
    """The largest batch size that fits the budget: from two traces if they align, refitted at the answer.

    With `multiple_of`, the largest that is such a multiple; only the answer is rounded, not the search.
    """
    start = perf_counter()
    traces = _Traces(tracer, tell)
    source: Callable[[int], Trace] = traces.at
    whole = align(*map(traces.at, FIT_BATCHES))
    budget = judge_budget(budget, job, traces.at(FIT_BATCHES[0]))
    if isinstance(whole, Trace):
        whole, found = _settle(job, whole, budget.arena, traces)
    if isinstance(whole, Trace):
        settled, found = whole, _settle_comfortable(job, found, budget.arena, traces)
        source = lambda batch: traces.at(batch) if traces.has(batch) else settled  # noqa: E731
    else:
        note = f"sizes are no straight line in the batch size, so each probe was traced by itself: {whole}"
        source = lambda batch: replace(traces.at(batch), notes=(*traces.at(batch).notes, note))  # noqa: E731
        notes = traces.at(FIT_BATCHES[0]).notes
        is_drawn = any(FROM_CHANCE in note or RANDOM_COURSE in note for note in notes)
        found = (_search_drawn if is_drawn else _search_anew)(job, budget.arena, traces)

    if multiple_of > 1:
        found = round_down(
            found,
            multiple_of,
            lambda batch: _outcome(job, batch, budget.arena, traces),
        )

    def at(batch: int) -> Estimate:
        found = estimate(job, over_epoch(job, batch, source), batch, budget, traces.seconds)
        return replace(found, notes=(*found.notes, *traces.limits()))

    at_max = at(found.largest) if found.largest else None
    at_comfortable = at_max if found.comfortable == found.largest else None
    if at_comfortable is None and found.comfortable:
        at_comfortable = at(found.comfortable)
    failure = found.first_failure if found.first_failure not in traces.too_large else None
    first_failure = at(failure) if failure else None
    seconds = Seconds(traces.seconds, perf_counter() - start - traces.seconds)
    return Plan(job, budget, found, at_max, first_failure, seconds, multiple_of, at_comfortable)


def _settle(job: Job, whole: Trace, arena: Arena, traces: "_Traces") -> tuple[Trace | str, Search]:
    """Search, and trace the answer and its successor, until the search that knows these traces says the same.

    Between batch sizes that were traced, scratch memory that follows no line stands as it was at the last
    answer; it decides little, so that answers hardly move. Where all of it follows lines, the successor needs
    no trace of its own. A smaller last batch is traced with the answer that it belongs to.
    """
    found = None
    for _ in range(MOST_REFITS):
        found = _search(job, whole, arena, traces, found)
        answer = max(found.largest, 1)
        is_new = not traces.has(answer)
        try:
            refitted = refit(whole, traces.at(answer))
        except BatchTooLargeError:
            return f"values cannot be read at batch {answer}", found
        if isinstance(refitted, str):
            return refitted, found
        was_right = _is_as_told(refitted, traces, last_batch(job, answer))
        if was_right and refitted.events == whole.events and is_new and not traces.has(answer + 1):
            return refitted, found
        if was_right and not is_new and (traces.has(answer + 1) or answer >= most_batch(job)):
            return refitted, found
        whole = refitted
        if found.largest < most_batch(job):
            traces.at(answer + 1)
            _is_as_told(whole, traces, last_batch(job, answer + 1))
    return whole, _search_anew(job, arena, traces, found)


def _settle_comfortable(job: Job, found: Search, arena: Arena, traces: "_Traces") -> Search:
    """Find the largest batch size without retries anew, from where the search saw it and by traces of its
    own: it is what a report leads with. With a good start that takes two of them, and none where the answer's
    showed that all sizes follow their lines.
    """
    follows_lines = found.largest < most_batch(job) and not traces.has(found.largest + 1)
    if found.comfortable in (0, found.largest) or follows_lines:
        return found
    seen = dict[int, Outcome]()

    def fits_at_ease(batch: int) -> bool:
        if batch not in seen:
            seen[batch] = replay_trace(over_epoch(job, batch, traces.at), batch, arena).outcome
        return seen[batch] is Outcome.FITS

    comfortable = boundary_near(fits_at_ease, found.comfortable, found.largest)
    probes = dict(found.probes) | seen
    return replace(found, comfortable=comfortable, probes=tuple(probes.items()))


def _is_as_told(whole: Trace, traces: "_Traces", last: int) -> bool:
    """Whether a last batch is traced as the whole told it; true where there is none, or nothing new."""
    if not last or traces.has(last):
        return True
    try:
        found = refit(whole, traces.at(last))
    except ModelError:  # the epoch will be played without it
        return False
    return isinstance(found, Trace) and found.events == whole.events


def _search(job: Job, whole: Trace, arena: Arena, traces: "_Traces", near: Search | None) -> Search:
    room, floor = room_bytes(arena), least_bytes(whole.events)

    def told(batch: int) -> Trace:
        return traces.at(batch) if traces.has(batch) else whole

    def outcome(batch: int) -> Outcome:
        if not traces.has(batch) and room is not None and floor(batch) > room:
            return Outcome.DOES_NOT_FIT
        return replay_trace(over_epoch(job, batch, told), batch, arena).outcome

    return largest(outcome, most_batch(job), near)


def _search_anew(job: Job, arena: Arena, traces: "_Traces", near: Search | None = None) -> Search:
    return largest(lambda batch: _outcome(job, batch, arena, traces), most_batch(job), near)


def _outcome(job: Job, batch: int, arena: Arena, traces: "_Traces") -> Outcome:
    """Whether a batch size fits that is traced by itself; one that cannot be traced ends the search."""
    try:
        return replay_trace(over_epoch(job, batch, traces.at), batch, arena).outcome
    except BatchTooLargeError:
        return Outcome.DOES_NOT_FIT


def _search_drawn(job: Job, arena: Arena, traces: "_Traces") -> Search:
    """Where sizes depend on chance, batch sizes above the answer tell little, and each takes a run."""
    endless = without_end(arena)

    def need_bytes(batch: int) -> int:
        return replay_trace(traces.at(batch), batch, endless).peak_reserved_bytes

    try:
        return largest_by_line(
            lambda batch: _outcome(job, batch, arena, traces),
            need_bytes,
            arena.share_bytes or 0,
            FIT_BATCHES,
            most_batch(job),
        )
    except BatchTooLargeError:  # the line leads beyond what can be traced
        return _search_anew(job, arena, traces)


class _Traces:
    """Takes each trace once and counts the time; a failure is remembered too."""

    def __init__(self, tracer: TraceSource, tell: OnProgress) -> None:
        self.seconds = 0.0
        self.too_large: dict[int, str] = {}  # batch sizes with more values than can be read, and why
        self._tracer, self._tell = tracer, tell
        self._taken: dict[int, Trace | ModelError] = {}

    def has(self, batch: int) -> bool:
        return batch in self._taken and batch not in self.too_large

    def limits(self) -> tuple[str, ...]:
        """Say from which batch size on nothing could be traced, if any."""
        if not self.too_large:
            return ()
        batch = min(self.too_large)
        return (f"batch sizes from {batch} on are not planned: {self.too_large[batch]}",)

    def at(self, batch: int) -> Trace:
        if batch not in self._taken:
            self._tell(f"tracing batch {batch}")
            start = perf_counter()
            try:
                self._taken[batch] = self._tracer(batch)
            except ModelError as error:
                self._taken[batch] = error
                if isinstance(error, BatchTooLargeError):
                    self.too_large[batch] = str(error)
            self.seconds += perf_counter() - start
        taken = self._taken[batch]
        if isinstance(taken, ModelError):
            raise taken
        return taken
