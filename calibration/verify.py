"""Verify estimates on this machine's GPU, by running their batches."""

from collections.abc import Callable, Mapping
from math import ceil

from msgspec import Struct

from calibration.probe.client import Measure, ProbeRequest
from planner.hardware.calibration import Observation
from planner.planning import Estimate, Plan, max_useful_batch
from planner.program import OnProgress, Outcome

LONGEST_RUN_SECONDS = 600.0
BEYOND = 1.05  # the factor from the largest batch to a batch that is expected to run out of memory


class Verification(Struct, frozen=True):
    """An estimate and a run of its job and batch size."""

    estimate: Estimate
    observation: Observation

    @property
    def ran(self) -> bool:
        """Return whether the run had enough memory."""
        return not self.observation.oom

    @property
    def agrees(self) -> bool:
        """Return whether the run succeeded or ran out of memory as the estimate predicted.

        At a high confidence a batch that was estimated not to fit may run, which is the price of confidence.
        """
        return self.ran == (self.estimate.outcome is not Outcome.DOES_NOT_FIT)

    @property
    def holds(self) -> bool:
        """Return whether a batch ran within the estimate's upper bound, or was estimated not to fit.

        If the process's peak was not measured, the batch only has to run.
        """
        if self.estimate.outcome is Outcome.DOES_NOT_FIT:
            return True
        process = self.observation.process_peak_bytes
        return self.ran and (process is None or process <= self.estimate.process_upper_bytes)

    @property
    def errors(self) -> Mapping[str, float]:
        """Return the relative error of each measured peak by name, or {} if the run was out of memory.

        An error is the estimated peak divided by the measured peak, minus 1.
        """
        if not self.ran:
            return {}
        run, measured = self.estimate.run, self.observation
        pairs = {
            "allocated": (run.peak_allocated_bytes, measured.peak_allocated_bytes),
            "reserved": (run.peak_reserved_bytes, measured.peak_reserved_bytes),
            "process": (self.estimate.process_bytes, measured.process_peak_bytes),
        }
        return {what: estimated / size - 1 for what, (estimated, size) in pairs.items() if size}


class LimitCheck(Struct, frozen=True):
    """The runs of a plan's largest batch and of larger batches, up to the first that is out of memory."""

    plan: Plan
    runs: tuple[Verification, ...]  # by ascending batch size

    @property
    def holds(self) -> bool:
        """Return whether every run stays within its estimate. See `Verification.holds`."""
        return all(run.holds for run in self.runs)

    @property
    def lived(self) -> int:
        """Return the largest batch size that ran, or 0 if no batch ran."""
        return max((run.observation.batch for run in self.runs if run.ran), default=0)

    @property
    def died(self) -> int | None:
        """Return the smallest batch size that ran out of memory, or None if no batch did."""
        return min((run.observation.batch for run in self.runs if not run.ran), default=None)


def verify_limit(
    plan: Plan,
    estimate_at: Callable[[int], Estimate],
    alloc_conf: str,
    on_progress: OnProgress,
    probe: Measure,
) -> LimitCheck:
    """Run a plan's largest batch and slightly larger batches, until one is out of memory.

    They are larger by 1 and, under an allocator cap, by a factor of 1.05. Sizes above `max_useful_batch` are
    left out. Without a cap, the result of the third run would depend on the memory of other processes on the
    GPU. Raises as `verify` does.
    """
    largest = plan.search.largest
    batches = {largest, largest + 1}
    if plan.budget.cap_bytes is not None:
        batches.add(ceil(BEYOND * largest))
    batches = {batch for batch in batches if batch <= max_useful_batch(plan.job)}
    estimates = {one.run.batch: one for one in (plan.at_max, plan.first_failure) if one is not None}
    runs: list[Verification] = []
    for batch in sorted(batches - {0}):
        estimate = estimates.get(batch) or estimate_at(batch)
        on_progress(f"running batch {batch}")
        runs.append(verify(estimate, alloc_conf, probe))
        if not runs[-1].ran:
            break
    return LimitCheck(plan, tuple(runs))


def verify(estimate: Estimate, alloc_conf: str, probe: Measure) -> Verification:
    """Run an estimate's batch on this machine's GPU, and return the estimate with the run.

    The estimate's allocator cap applies, if there is one. The run is not stored. Raises NoGpuError without a
    GPU, ModelError if the steps fail.
    """
    request = ProbeRequest(estimate.job, estimate.run.batch, estimate.budget.cap_bytes, alloc_conf)
    return Verification(estimate, probe(request, LONGEST_RUN_SECONDS))
