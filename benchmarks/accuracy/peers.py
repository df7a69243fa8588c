"""Estimates of the closed formula, torchinfo and MemTracker for the rows of the accuracy report."""

from benchmarks.accuracy.rows import PEERS
from planner.allocator.config import AllocatorConfig
from planner.errors import PlannerError
from planner.hardware.budget import make_budget
from planner.hardware.device import MIB, unlimited_device
from planner.jobs import Job
from planner.planning.estimators.methods import Method
from planner.planning.programs import Factory


def peer_estimates(job: Job, batch: int, factory: Factory | None = None) -> dict[str, float]:
    """Estimate by closed formula, torchinfo and MemTracker, in MiB, without those that fail on the model."""
    from planner.planning.estimators.run import model_builder, run_estimator

    budget = make_budget(unlimited_device(), 0.5, AllocatorConfig())
    build = model_builder(job, factory, lambda line: None)
    estimates = {}
    for name in PEERS:
        try:
            estimate = run_estimator(Method(name), job, batch, budget, build, lambda line: None)
        except PlannerError:
            continue
        estimates[name] = estimate.total_bytes / MIB
    return estimates
