"""Traces of one job for any batch size and any GPU, from as few runs of its model as that takes.

Two runs make a loop (`recast`), which holds for every GPU on which the model takes the same path. Which those
are shows in what the run asks of the compute capability (`watched`); where the answers differ, one more run
tells whether the path does.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import perf_counter

from torch import nn

from planner.capture.cudnn_target import equip
from planner.capture.session import record
from planner.capture.symbolic.capability_guards import Watched
from planner.capture.symbolic.fit_lines import find_loop
from planner.capture.symbolic.kernel_calls import Calls, Run, UnsteadyError
from planner.capture.symbolic.recast import Loop, differs, opening_end
from planner.jobs import Job, Mode
from planner.program import Target, Trace

RUN_BATCHES = (2, 3)  # at batch 1 broadcasting takes shortcuts, so it is no end of a straight line
OnProgress = Callable[[str], None]


@dataclass(slots=True)
class Loops:
    """The loops of a job; more are found as more kinds of GPUs are asked for."""

    job: Job
    build: Callable[[Job], nn.Module]
    tell: OnProgress
    runs: int = 0  # of the model so far
    seconds: float = 0.0  # that they took
    _found: list[tuple[Watched, Loop]] = field(default_factory=list)

    def of(self, chip: Target) -> Loop:
        """The loop that such a GPU runs. Raises UnsteadyError where no two runs make one."""
        for watched, loop in self._found:
            if watched.agrees(chip.capability):
                return loop
        low, high = RUN_BATCHES
        watched = Watched(chip.capability)
        known = self._known(chip, watched)
        if known is None:
            first = self._run(self.job, low, chip, watched)
            second = self._run(self.job, high, chip, watched)
            known = find_loop(first, second, self.job.cublas_workspace_config)
        self._found.append((watched, known))
        return known

    def _known(self, chip: Target, watched: Watched) -> Loop | None:
        """A loop that was found for others and that this GPU runs too. Where steps are alike, one tells."""
        loops = list({id(loop): loop for _, loop in self._found}.values())
        if not loops:
            return None
        batch, chip = RUN_BATCHES[0], self.equip(chip)
        if self.job.mode is not Mode.TRAIN or self.job.evaluate:
            whole = self._run(self.job, batch, chip, watched).trace
            return next((loop for loop in loops if not differs(loop.at(batch, chip), whole)), None)
        once = self._run(replace(self.job, steps=1), batch, chip, watched).trace
        step = replace(once, events=once.events[: opening_end(once.events)])
        return next((loop for loop in loops if not differs(loop.opening_at(batch, chip), step)), None)

    def at(self, batch: int, chip: Target) -> Trace:
        """The trace of a batch size on such a GPU. Raises UnsteadyError."""
        return self.of(chip).at(batch, self.equip(chip))

    def equip(self, chip: Target) -> Target:
        """The chip as the job's rules see it. Raises UsageError."""
        return equip(chip, self.job)

    def confirm(self, batch: int, chip: Target) -> str:
        """Where a run differs from what its loop says; "" where it does not."""
        run = self.run(batch, chip)
        return differs(self.at(batch, chip), run.trace)

    def run(self, batch: int, chip: Target, watched: Watched | None = None) -> Run:
        """One run of the job. `watched`, the chip's capability, remembers what the run asks of it."""
        return self._run(self.job, batch, chip, Watched(chip.capability) if watched is None else watched)

    def _run(self, job: Job, batch: int, chip: Target, watched: Watched) -> Run:
        major, minor = chip.capability
        self.tell(f"tracing batch {batch} for compute capability {major}.{minor}")
        start = perf_counter()
        calls = Calls()
        taken = record(
            job,
            batch,
            chip.capability,
            self.build,
            calls=calls,
            path_of=watched,
            sm_count=chip.sm_count,
        )
        self.runs += 1
        self.seconds += perf_counter() - start
        return Run(taken, tuple(calls.found))


__all__ = ["Loops", "UnsteadyError"]
