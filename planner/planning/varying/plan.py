"""Find the largest batch, or the memory of one batch, for samples that vary in size.

A `VaryingPlan` has two results: with the user's configuration of the allocator, and with expandable segments
switched on, or off if they were on.
"""

from math import lcm
from time import perf_counter

from msgspec import Struct
from msgspec.structs import replace

from planner.errors import BatchTooLargeError, UsageError
from planner.hardware import EVEN_ODDS, Budget, judge_budget, process_bytes, upper_process_bytes, with_config
from planner.jobs import Batching, BatchShape, Job, Mode, Size, SizeDistribution
from planner.planning.estimate import Answer, Seconds
from planner.planning.search.boundary import boundary_from_guess
from planner.planning.search.fleet import DeviceFit
from planner.planning.search.one_gpu import search_device
from planner.planning.search.replays import ReplayCache, TargetReplays
from planner.planning.varying.process import BatchSource
from planner.planning.varying.programs import SizedPrograms
from planner.planning.varying.risk import RunRisk, sample_runs
from planner.program import FIT_BATCHES, LARGEST_BATCH, Outcome

SEARCH_STEPS = 40  # steps of a probe of the search; the answer is confirmed with more
SEARCH_SEQUENCES = 1
TOKENS_UNIT = 64  # the step in which the largest number of tokens of a batch is searched


class VaryingSide(Struct, frozen=True):
    """The largest batch and the risks of running out of memory under one configuration of the allocator."""

    budget: Budget
    largest: int  # largest batch whose probability of running out of memory is acceptable; 0 if none is
    at: RunRisk | None  # at the largest batch, or at the requested batch; None if no batch is acceptable
    beyond: RunRisk | None = None  # at the next larger batch; None if a batch was requested

    @property
    def expandable_segments(self) -> bool:
        """Return whether the allocator's segments are expandable."""
        return self.budget.limits.config.expandable_segments

    @property
    def process_bytes(self) -> int | None:
        """Return the process's peak memory as nvidia-smi shows it, or None without runs."""
        return None if self.at is None else process_bytes(self.budget, self.at.peak_reserved_bytes)


class VaryingPlan(Struct, frozen=True):
    """The largest batch, or one batch's memory, for varying sizes, under two allocator configurations."""

    job: Job
    sizes: SizeDistribution
    batch: int | None  # the requested batch; None if the largest was requested
    risk: float  # the probability of running out of memory that an answer may have
    sides: tuple[VaryingSide, ...]  # the user's configuration first
    constant: int  # largest batch that fits if all samples have the largest size; 0 if none or not searched
    notes: tuple[str, ...]
    unknown_ops: tuple[str, ...]
    seconds: Seconds

    @property
    def largest_size(self) -> Size:
        """Return the largest size to which samples can be padded."""
        return self.sizes.largest


def check_varying(job: Job) -> None:
    """Raise UsageError for options that are not planned together with samples of many sizes."""
    ranged = next(str(spec) for spec in job.samples.inputs if spec.smallest)
    refused = {
        f"--mode {job.loop.mode}": job.loop.mode in (Mode.GENERATE, Mode.STEP),
        "--evaluate": job.loop.evaluate,
        "--dataset-size": bool(job.samples.dataset_size),
        f"--steps {job.loop.steps}": job.loop.steps < 3,
        "--cudnn-benchmark": job.environment.cudnn_benchmark,  # searches again for each new size
    }
    for flag, is_given in refused.items():
        if is_given:
            raise UsageError(
                f"--input {ranged} and {flag}: not planned together; remove {flag.split()[0]}, or give "
                "one size"
            )


def estimate_varying(job: Job, budget: Budget, programs: SizedPrograms, batch: int) -> VaryingPlan:
    """Estimate the memory and the risk of sampled runs at a batch size, under two allocator configurations.

    Raises the errors of a capture.
    """
    start = perf_counter()
    budget = judged(budget, programs)
    sides = []
    source = open_batches(job, programs)
    for own in _configurations(budget):
        at = sample_runs(job, programs.sizes, source, own.limits, batch)
        fits = at.probability <= risk_of(budget)
        sides.append(VaryingSide(own, batch if fits else 0, at))
    return _plan(job, budget, programs, batch, sides, 0, start)


def find_varying_batch(
    job: Job, budget: Budget, programs: SizedPrograms, multiple_of: int = 1
) -> VaryingPlan:
    """Find the largest batch with an acceptable risk under each of two configurations of the allocator.

    The probability may be at most 1 minus the budget's confidence. Raises the errors of a capture.
    """
    start = perf_counter()
    budget = judged(budget, programs)
    sides, constant = [], 0
    source = open_batches(job, programs)
    for own in _configurations(budget):
        constant_batch = _constant_batch(own, programs)
        constant = constant or constant_batch
        sides.append(_side(job, own, programs, source, constant_batch, multiple_of))
    return _plan(job, budget, programs, None, sides, constant, start)


def find_varying_fit(
    job: Job, budget: Budget, programs: SizedPrograms, batch: int | None = None, multiple_of: int = 1
) -> DeviceFit:
    """Return the largest batch on a GPU, with the memory and outcome of one batch size.

    The memory and the outcome are computed for `batch`, or by default for the largest batch. Retries are
    normal in a run on varying sizes, so the largest batch also counts as the comfortable batch. Raises the
    errors of a capture.
    """
    budget = judged(budget, programs)
    side = plan_side(job, budget, programs, multiple_of)
    asked = batch or side.largest or 1
    at = sampled_at(side, job, programs, asked)
    lives = at.probability <= risk_of(budget)
    retries = Outcome.FITS_WITH_RETRIES if at.retries_per_step else Outcome.FITS
    return DeviceFit(
        budget,
        side.largest,
        asked,
        retries if lives else Outcome.DOES_NOT_FIT,
        process_bytes(budget, at.peak_reserved_bytes),
        upper_process_bytes(budget, at.peak_reserved_bytes),
        side.largest,
        Answer.FITS if lives else Answer.LIKELY if at.probability < EVEN_ODDS else Answer.DOES_NOT_FIT,
        None if lives else at.probability,
    )


def plan_side(job: Job, budget: Budget, programs: SizedPrograms, multiple_of: int = 1) -> VaryingSide:
    """Find the largest batch under a budget, with the risk at it and at the next larger batch.

    Raises the errors of a capture.
    """
    constant = _constant_batch(budget, programs)
    return _side(job, budget, programs, open_batches(job, programs), constant, multiple_of)


def sampled_at(side: VaryingSide, job: Job, programs: SizedPrograms, batch: int) -> RunRisk:
    """Return the risk at a batch size under a side's budget, sampling runs unless the side has the risk.

    Raises the errors of a capture.
    """
    if side.at is not None and side.at.batch == batch:
        return side.at
    return sample_runs(job, programs.sizes, open_batches(job, programs), side.budget.limits, batch)


def open_batches(job: Job, programs: SizedPrograms) -> BatchSource:
    """Return a `BatchSource` of a job, which gives the events of batches of any shape."""
    trace = programs.trace(BatchShape(FIT_BATCHES[0], programs.sizes.largest))
    return BatchSource(job, programs.specialized, trace.next_workspaces)


def judged(budget: Budget, programs: SizedPrograms) -> Budget:
    """Return the budget with the margins that published runs give for the job at its largest size."""
    size = programs.sizes.largest
    trace = programs.trace(BatchShape(FIT_BATCHES[0], size))
    return judge_budget(budget, programs.job_at(size), trace)


def _configurations(budget: Budget) -> tuple[Budget, Budget]:
    config = budget.limits.config
    other = replace(config, expandable_segments=not config.expandable_segments)
    return budget, with_config(budget, other)


def risk_of(budget: Budget) -> float:
    """Return the largest probability of running out of memory that a budget accepts."""
    return round(1 - budget.confidence, 12)


def _constant_batch(budget: Budget, programs: SizedPrograms) -> int:
    """Return the largest batch size that fits if all samples have the largest size."""
    source, target = programs.source(programs.sizes.largest), budget.device.target
    replays = TargetReplays(ReplayCache(source), target, source.bound(target), LARGEST_BATCH)
    return search_device(replays, (budget.limits,)).largest


def _side(
    job: Job,
    budget: Budget,
    programs: SizedPrograms,
    source: BatchSource,
    constant: int,
    multiple_of: int,
) -> VaryingSide:
    counts_tokens = job.samples.batching is Batching.TOKENS
    unit = lcm(TOKENS_UNIT, multiple_of) if counts_tokens else multiple_of
    guess = constant * (max(programs.sizes.largest) if counts_tokens else 1) // unit
    quick: dict[int, bool] = {}
    full: dict[int, RunRisk] = {}

    def is_within(risk: RunRisk) -> bool:
        return risk.probability <= risk_of(budget)

    def fits_quickly(number: int) -> bool:
        if number not in quick:
            try:
                risk = sample_runs(
                    job, programs.sizes, source, budget.limits, number * unit, SEARCH_SEQUENCES, SEARCH_STEPS
                )
            except BatchTooLargeError:
                quick[number] = False
            else:
                quick[number] = is_within(risk)
            source.forget()
        return quick[number]

    def sampled(number: int) -> RunRisk:
        if number not in full:
            full[number] = sample_runs(job, programs.sizes, source, budget.limits, number * unit)
            source.forget()
        return full[number]

    best = boundary_from_guess(fits_quickly, guess, LARGEST_BATCH // unit)
    best = boundary_from_guess(lambda number: is_within(sampled(number)), best, best)
    at = sampled(best) if best else None
    beyond = sampled(best + 1)
    return VaryingSide(budget, best * unit, at, beyond)


def _plan(
    job: Job,
    budget: Budget,
    programs: SizedPrograms,
    batch: int | None,
    sides: list[VaryingSide],
    constant: int,
    start: float,
) -> VaryingPlan:
    trace = programs.trace(BatchShape(FIT_BATCHES[0], programs.sizes.largest))
    spent = perf_counter() - start
    seconds = Seconds(programs.seconds, spent - programs.seconds)
    return VaryingPlan(
        job,
        programs.sizes,
        batch,
        risk_of(budget),
        tuple(sides),
        constant,
        trace.notes,
        trace.unknown_ops,
        seconds,
    )
