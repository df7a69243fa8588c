"""One job on many cards while its model runs in a process of its own: each card planned by itself."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache

from planner.capture.subprocess.client import Apart
from planner.hardware import Budget
from planner.jobs import Job
from planner.planning import CardFit, Estimate, TraceSource, estimate, over_epoch, plan_max_batch
from planner.program import Floor, Target, Trace


@dataclass(slots=True)
class FromApart:
    """The traces of one process, which serves all cards."""

    job: Job
    apart: Apart
    _tracers: dict[Target, TraceSource] = field(default_factory=dict)

    def at(self, batch: int, chip: Target) -> Trace:
        """The whole trace."""
        if chip not in self._tracers:
            self._tracers[chip] = cache(lambda size: self.apart.trace(size, chip))
        return self._tracers[chip](batch)

    def kin(self, batch: int, chip: Target) -> Hashable:
        """Only the traces tell."""
        return None

    def floor(self, chip: Target) -> Floor:
        """Nothing is known from below."""
        return lambda batch: 0

    def fit(self, budgets: Sequence[Budget], batch: int | None, multiple_of: int = 1) -> tuple[CardFit, ...]:
        """What each card can do, as `plan_max_batch` says it."""
        return tuple(self._fit(budget, batch, multiple_of) for budget in budgets)

    def _fit(self, budget: Budget, batch: int | None, multiple_of: int) -> CardFit:
        chip = budget.device.target
        plan = plan_max_batch(self.job, budget, lambda size: self.at(size, chip), multiple_of=multiple_of)
        size = batch or plan.search.largest or 1
        found: Estimate | None = plan.at_max if size == plan.search.largest else None
        if found is None:
            trace = over_epoch(self.job, size, lambda one: self.at(one, chip))
            found = estimate(self.job, trace, size, budget)
        return CardFit(
            found.budget,
            plan.search.largest,
            size,
            found.outcome,
            found.process_bytes,
            found.process_upper_bytes,
            plan.search.comfortable,
        )
