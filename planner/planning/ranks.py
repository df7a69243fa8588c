"""Choose which ranks of a job on several GPUs to plan, and merge their estimates."""

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from planner.jobs import Job
from planner.planning.estimate import Estimate, RankFigures
from planner.program import Fact, Outcome, Trace

MOST_RANKS = 8  # the number of ranks up to which all ranks that may differ are planned
_ORDER = (Outcome.FITS, Outcome.FITS_WITH_RETRIES, Outcome.DOES_NOT_FIT)


def count_ranks(job: Job) -> int:
    """Return the number of ranks of a job, or 1 if all ranks are equal, as with DDP and DeepSpeed."""
    return 1 if job.sharding.deepspeed else job.sharding.ranks


def ranks_to_plan(job: Job, trace: Trace) -> tuple[int, ...]:
    """Return the ranks to plan in addition to rank 0, or () if all ranks hold equal parts.

    `trace` is the trace of rank 0. Of more than `MOST_RANKS` ranks, the planned ranks are the last rank and
    each rank whose distance from the first or the last is a power of two, which include the ends of each
    dimension of a usual mesh. For a model that the planner shards, only the last rank is planned, since parts
    become smaller from rank to rank.
    """
    count = count_ranks(job)
    if Fact.EQUAL_PARTS in trace.facts:
        return ()
    if count <= MOST_RANKS:
        return tuple(range(1, count))
    if not job.sharding.world_size:
        return (count - 1,)
    steps = [2**power for power in range(count.bit_length()) if 2**power < count]
    return tuple(sorted({*steps, *(count - 1 - step for step in steps), count - 1} - {0}))


def is_worse(one: Estimate, other: Estimate) -> bool:
    """Return whether `one` has a worse outcome than `other` or, at an equal outcome, more process memory.

    At equal process memory, the allocated peak decides.
    """
    return _badness(one) > _badness(other)


def with_ranks(worst: Estimate, by_rank: Mapping[int, Estimate], notes: Iterable[str] = ()) -> Estimate:
    """Return the worst rank's estimate with the figures of all planned ranks and the notes added.

    Ranks with equal figures share a row. If the job has no ranks that differ, `worst` is returned unchanged.
    The figures of a single planned rank hold for all ranks.
    """
    if count_ranks(worst.job) == 1:
        return worst
    alike: dict[tuple[Outcome, int, int, int], list[int]] = {}
    for rank, estimate in sorted(by_rank.items()):
        alike.setdefault(_figures(estimate), []).append(rank)
    if len(by_rank) == 1:  # its figures hold for all ranks
        alike = {figures: [*range(count_ranks(worst.job))] for figures in alike}
    rows = tuple(RankFigures(tuple(ranks), *figures) for figures, ranks in alike.items())
    return replace(worst, ranks=rows, notes=(*worst.notes, *notes))


def _figures(estimate: Estimate) -> tuple[Outcome, int, int, int]:
    run = estimate.run
    return estimate.outcome, run.peak_allocated_bytes, run.peak_reserved_bytes, estimate.process_bytes


def _badness(estimate: Estimate) -> tuple[int, int, int]:
    return (
        _ORDER.index(estimate.outcome),
        estimate.process_bytes,
        estimate.run.peak_allocated_bytes,
    )
