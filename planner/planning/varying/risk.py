"""Estimate the probability that a run on sampled batches runs out of memory.

Several sequences of batches are drawn. Each is replayed step after step under the limits, up to MOST_STEPS.
The final state is then probed with a next batch of several sizes: the smallest size that does not fit is the
critical size. A run of N steps fails if it draws a batch of at least the critical size, and the probability
of that draw follows from the distribution alone. So rare sizes count although no sequence has drawn them. The
spread between sequences gives the standard error.
"""

from collections.abc import Sequence
from math import prod, sqrt
from statistics import fmean, stdev

from msgspec import Struct

from planner.allocator import MemoryLimits, Replay
from planner.jobs import Batching, BatchShape, Job, Size, SizeDistribution, draw_batches
from planner.planning.varying.process import BatchSource, VaryingProcess

SEQUENCES = 4
MOST_STEPS = 100  # of a sequence that are replayed; sizes that later steps may draw are probed


class SampledRun(Struct, frozen=True):
    """The replay of one sampled sequence of batches."""

    replay: Replay  # up to the step that fails, if any
    steps: int  # number of replayed steps, including a failing step
    reserved_bytes: int  # at the end of the replay
    largest: BatchShape  # the batch of the largest size in the replayed steps
    worst: BatchShape  # the batch with the most elements in `worst_step`
    worst_step: int  # the step that runs out of memory, else the first step that reaches the allocated peak
    critical: Size | None  # the smallest size that does not fit after the replay; None if all fit
    probability: float  # the probability that a run of all steps runs out of memory

    @property
    def failed_step(self) -> int | None:
        """Return the step that ran out of memory, or None if no step did."""
        return self.steps if self.replay.failure is not None else None


class RunRisk(Struct, frozen=True):
    """The risk of running out of memory at one batch size, estimated from sampled runs."""

    batch: int
    steps: int  # of a whole run, to which the probability applies
    runs: tuple[SampledRun, ...]

    @property
    def probability(self) -> float:
        """Return the probability that a run runs out of memory, the mean over the sampled runs."""
        return fmean(run.probability for run in self.runs)

    @property
    def standard_error(self) -> float | None:
        """Return the probability's standard error by the spread between runs, or None for a single run."""
        if len(self.runs) < 2:
            return None
        return stdev(run.probability for run in self.runs) / sqrt(len(self.runs))

    @property
    def peak_allocated_bytes(self) -> int:
        """Return the largest allocated peak of any sequence."""
        return max(run.replay.peak_allocated_bytes for run in self.runs)

    @property
    def peak_reserved_bytes(self) -> int:
        """Return the largest reserved peak of any sequence."""
        return max(run.replay.peak_reserved_bytes for run in self.runs)

    @property
    def fragmentation_bytes(self) -> int:
        """Return the largest difference between a sequence's reserved and allocated peaks."""
        return max(run.replay.peak_reserved_bytes - run.replay.peak_allocated_bytes for run in self.runs)

    @property
    def retries_per_step(self) -> float:
        """Return the mean number of allocator retries per step, over all runs."""
        return sum(run.replay.retries for run in self.runs) / max(1, sum(run.steps for run in self.runs))

    def step_peaks_bytes(self, *shares: float) -> tuple[int, ...]:
        """Return the quantiles of the steps' allocated peaks, one for each of `shares`."""
        peaks = sorted(p.allocated_bytes for run in self.runs for p in run.replay.step_peaks)
        return tuple(peaks[min(len(peaks) - 1, int(share * len(peaks)))] for share in shares)


def sample_runs(
    job: Job,
    sizes: SizeDistribution,
    source: BatchSource,
    limits: MemoryLimits,
    batch: int,
    sequences: int = SEQUENCES,
    most_steps: int = MOST_STEPS,
) -> RunRisk:
    """Replay sampled sequences of batches, and return the risk of running out of memory.

    Raises the errors of a capture.
    """
    steps = min(job.samples.run_steps, most_steps)
    runs = (_sample(job, sizes, source, limits, batch, number, steps) for number in range(sequences))
    return RunRisk(batch, job.samples.run_steps, tuple(runs))


def _sample(
    job: Job,
    sizes: SizeDistribution,
    source: BatchSource,
    limits: MemoryLimits,
    batch: int,
    sequence: int,
    steps: int,
) -> SampledRun:
    per_step = job.loop.accumulate
    shapes = draw_batches(job, sizes, batch, sequence, steps * per_step)
    by_step = [shapes[start : start + per_step] for start in range(0, len(shapes), per_step)]
    process = _play(source, limits, shapes[0], by_step)
    state = (
        process
        if process.is_alive
        else _play(source, limits, shapes[0], by_step[: max(0, process.steps - 1)])
    )
    critical = None
    if limits.allocator_limit_bytes is not None:
        critical = _critical_size(state, sizes, by_step[max(0, process.steps - 1)])
    if len(sizes.ranges) > 1 or job.samples.batching is Batching.TOKENS:
        probability = float(not process.is_alive)
    elif critical is None or job.samples.batching is Batching.PACKED:
        probability = float(not process.is_alive or critical is not None)
    else:
        samples = 1 if job.samples.batching is Batching.SCALED else batch
        probability = 1 - sizes.share_below(critical[0]) ** (samples * per_step * job.samples.run_steps)
    replay = process.replay(batch)
    worst_step = max(1, process.steps) if replay.failure else _highest_step(replay)
    return SampledRun(
        replay,
        process.steps,
        process.reserved_bytes,
        max(shapes[: max(1, process.steps) * per_step], key=lambda shape: shape.size),
        max(by_step[worst_step - 1], key=lambda shape: shape.batch * prod(shape.size)),
        worst_step,
        critical,
        probability,
    )


def _highest_step(replay: Replay) -> int:
    """Return the number of the first step that reaches the allocated peak."""
    peaks = [peaks.allocated_bytes for peaks in replay.step_peaks]
    return peaks.index(max(peaks)) + 1


def _play(
    source: BatchSource, limits: MemoryLimits, first: BatchShape, by_step: Sequence[Sequence[BatchShape]]
) -> VaryingProcess:
    """Replay steps until one fails, and return the process."""
    process = VaryingProcess(source, limits, first)
    for shapes in by_step:
        if not process.is_alive or not process.step(shapes):
            break
    return process


def _critical_size(state: VaryingProcess, sizes: SizeDistribution, last: Sequence[BatchShape]) -> Size | None:
    """Return the smallest size at which a next batch does not fit, or None if every size fits.

    The batch replaces the last batch of the step `last`. If samples vary in several dimensions, only the
    largest size is tried. If not even the set-up fits in memory, the smallest size is returned.
    """
    if not state.is_alive:  # the model itself does not fit
        return sizes.smallest

    def survives(size: Size) -> bool:
        return state.copy().step([*last[:-1], BatchShape(last[-1].batch, size)])

    if survives(sizes.largest):
        return None
    if len(sizes.ranges) > 1:
        return sizes.largest
    paddings = sizes.paddings()
    low, high = -1, len(paddings) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if survives((paddings[middle],)) else (low, middle)
    return (paddings[high],)
