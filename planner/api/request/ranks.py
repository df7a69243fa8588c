"""Plan the ranks of a job, and report the rank that takes the most memory."""

from time import perf_counter

from msgspec.structs import replace

from planner.api.request.request import Request
from planner.errors import PlannerError
from planner.jobs import Job
from planner.planning import (
    EpochPrograms,
    Estimate,
    Plan,
    count_ranks,
    estimate_batch,
    find_max_batch,
    is_worse,
    ranks_to_plan,
    with_ranks,
)
from planner.program import Outcome, ProgramSet, Trace


class Ranks:
    """The ranks of a request's job, planned by the rank that takes the most memory.

    Programs are opened when first needed. If the request names a rank, or its traces are from a file, only
    the request's own rank is planned.
    """

    def __init__(self, request: Request) -> None:
        """Create the ranks of a request, of which the request's own rank is the first to plan."""
        self._request = request
        self._programs: dict[int, ProgramSet] = {}
        job = request.job
        is_given = (
            request.options.get("rank") is not None or job.sharding.rank > 0 or request.saved is not None
        )
        self._are_searched = not is_given and count_ranks(job) > 1
        self.first = job.sharding.rank

    def request_of(self, rank: int) -> Request:
        """Return a copy of the request for a rank."""
        return replace(self._request, job=self._job(rank))

    def programs(self, rank: int) -> ProgramSet:
        """Return the programs of a rank, opened on the first call. Raises UsageError."""
        if rank not in self._programs:
            self._programs[rank] = self.request_of(rank).programs()
        return self._programs[rank]

    def estimate(self, batch: int) -> Estimate:
        """Return the estimate of the worst rank at a batch size, with the figures of all planned ranks.

        Raises the errors of a capture of the first rank; notes name other ranks that cannot be captured.
        """
        return self._worst_over_ranks(self._estimate(self.first, batch))

    def find_max_batch(self, multiple_of: int) -> Plan:
        """Find the largest batch that fits on all planned ranks. Raises the errors of a capture."""
        planned: set[int] = set()
        rank = self.first
        while True:
            planned.add(rank)
            plan = find_max_batch(self._job(rank), self._request.budget, self.programs(rank), multiple_of)
            if not self._are_searched:
                return plan
            plan, worse = self._with_ranks(plan)
            if worse is None or worse in planned:
                return plan
            rank = worse

    def _with_ranks(self, plan: Plan) -> tuple[Plan, int | None]:
        """Return the plan with all ranks' figures and None, or unchanged with the rank of a worse outcome."""
        sides = {name: getattr(plan, name) for name in ("at_max", "at_comfortable")}
        fuller: dict[int, Estimate] = {}
        for side in sides.values():
            if side is None or side.run.batch in fuller:
                continue
            everywhere = self._worst_over_ranks(side)
            if _breaks(everywhere, side):
                return plan, everywhere.job.sharding.rank
            own = replace(side, ranks=everywhere.ranks, notes=everywhere.notes)
            fuller[side.run.batch] = own
        changed = {name: side and fuller[side.run.batch] for name, side in sides.items()}
        return replace(plan, **changed), None

    def _worst_over_ranks(self, own: Estimate) -> Estimate:
        """Return the worst estimate over all planned ranks at the batch size of `own`.

        `own` is the estimate of one rank, and is returned if only one rank is planned. Notes name ranks that
        cannot be planned.
        """
        if not self._are_searched:
            return own
        batch, by_rank, notes = own.run.batch, {own.job.sharding.rank: own}, []
        worst = own
        trace = self._trace(self.first, batch)
        for rank in (self.first, *ranks_to_plan(self._request.job, trace)):
            if rank in by_rank:
                continue
            self._request.on_progress(f"tracing rank {rank}")
            try:
                by_rank[rank] = self._estimate(rank, batch)
            except PlannerError as error:
                notes.append(f"rank {rank} is not planned: {error}")
                continue
            if is_worse(by_rank[rank], worst):
                worst = by_rank[rank]
        return with_ranks(worst, by_rank, notes)

    def _estimate(self, rank: int, batch: int) -> Estimate:
        start = perf_counter()
        trace = self._trace(rank, batch)
        return estimate_batch(self._job(rank), trace, self._request.budget, perf_counter() - start)

    def _trace(self, rank: int, batch: int) -> Trace:
        target = self._request.budget.device.target
        return EpochPrograms(self._job(rank), self.programs(rank)).trace(batch, target)

    def _job(self, rank: int) -> Job:
        return self._request.job.replace(rank=rank)


def _breaks(everywhere: Estimate, own: Estimate) -> bool:
    """Return whether `everywhere` is the estimate of another rank, with a worse outcome than `own`.

    `everywhere` is the worst estimate over all ranks.
    """
    if everywhere.job.sharding.rank == own.job.sharding.rank or everywhere.outcome is own.outcome:
        return False
    return everywhere.outcome is Outcome.DOES_NOT_FIT or own.outcome is Outcome.FITS
