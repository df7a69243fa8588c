"""Programs of one job for any GPU, from as few runs of its model as that takes.

Two runs are fitted to a program, which a third one validates. It holds for every GPU on which the model takes
the same code path. A run records the comparisons with its compute capability as guards; where those do not
hold for another capability, one more run shows whether the path is the same.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from msgspec.structs import replace
from torch import nn

from planner.capture.models.registry import construct_model, find_constructor
from planner.capture.session import record
from planner.capture.symbolic.capability_guards import GuardedCapability
from planner.capture.symbolic.fit_program import fit_program
from planner.capture.symbolic.kernel_calls import RecordedCall, RecordedRun
from planner.capture.symbolic.rules import SignatureRules
from planner.capture.symbolic.validate import find_valid_range, needs_batch_one
from planner.errors import ModelError
from planner.jobs import Compile, Job, Mode
from planner.program import (
    FIT_BATCHES,
    NotAffineError,
    OnProgress,
    Program,
    Target,
    constant_ops,
    constant_program,
    first_divergence,
    first_step,
)


@dataclass(slots=True)
class _Path:
    """The program that GPUs run for which the guards hold."""

    guards: GuardedCapability
    program: Program | None  # None: `reason` holds why there is none
    reason: str = ""


@dataclass(slots=True)
class ProgramBuilder:
    """Captures the programs of a job; see `planner.program.ProgramBuilder`."""

    job: Job
    build: Callable[[Job], nn.Module]
    on_progress: OnProgress
    runs: int = 0  # of the model so far
    _paths: list[_Path] = field(default_factory=list)
    _max_batches: dict[int, int] = field(default_factory=dict)  # validated, by program; 0: it is wrong
    _runs: dict[int, list[tuple[GuardedCapability, Program]]] = field(default_factory=dict)  # by batch size

    def programs(self, target: Target) -> tuple[Program, ...]:
        """Return the program for such GPUs, and a large job's run at batch 1, since small GPUs need it.

        None where two runs do not fit to a program, or a third one contradicts it. Raises the errors of a
        capture, save that a model may refuse batch 1, as batch norm does for single values.
        """
        if self.job.compile is not Compile.NONE:
            return ()  # inductor decides by sizes and by the number of multiprocessors
        given, target = target, _without_answers(target)
        program = self._path(target).program
        if program is None:
            return ()
        if id(program) not in self._max_batches:
            valid = find_valid_range(program, lambda batch: self.divergence(program, batch, target))
            self._max_batches[id(program)] = valid
        max_batch = self._max_batches[id(program)]
        if not max_batch:
            return ()
        programs = [with_target(program, target, FIT_BATCHES[0], max_batch)]
        if needs_batch_one(program):
            with suppress(ModelError):
                programs.append(self.run(1, given))
        return tuple(programs)

    def fit(self, target: Target) -> Program | None:
        """Return the program for such GPUs before its range is validated; None where two runs fit to none."""
        program = self._path(_without_answers(target)).program
        return None if program is None else with_target(program, target, FIT_BATCHES[0], FIT_BATCHES[1])

    def run(self, batch: int, target: Target) -> Program:
        """Return the program of one run, which holds for its batch size. Raises the errors of a capture.

        One run serves all GPUs for which its guards hold, if its kernels can be separated from the rest.
        """
        for guards, program in self._runs.get(batch, []):
            if program.rules is not None and guards.guards_hold(target.capability):
                return with_target(program, target, batch, batch)
        guards = GuardedCapability(target.capability)
        return self._keep_run(self._run(self.job, batch, target, guards), guards, target)

    def enumerate_variants(self, program: Program, target: Target) -> None:
        """Evaluate the workspace rules at sample batch sizes and numbers of SMs."""
        if isinstance(program.rules, SignatureRules):
            program.rules.enumerate(program.targets[target.capability], target)

    def _keep_run(self, run: RecordedRun, guards: GuardedCapability, target: Target) -> Program:
        program = _single_run(run, self.job, target)
        reasons = [path.reason for path in self._paths if path.guards.guards_hold(target.capability)]
        if self.job.compile is not Compile.NONE:
            program.notes = (*program.notes, "each batch size that was tried was compiled by itself")
        if any(reasons):
            why = "sizes are no straight line in the batch size, so each probe was traced by itself"
            program.notes = (*program.notes, f"{why}: {reasons[0]}")
        self._runs.setdefault(run.trace.batch, []).append((guards, program))
        return program

    # ---- programs for more than one batch size

    def _path(self, target: Target) -> _Path:
        for path in self._paths:
            if path.guards.guards_hold(target.capability):
                return path
        guards = GuardedCapability(target.capability)
        path = _Path(guards, self._same_program(target, guards))
        if path.program is not None:
            self._paths.append(path)
            return path
        first, second = (self._run(self.job, batch, target, guards) for batch in FIT_BATCHES)
        self._paths.append(path)
        try:
            path.program = fit_program(first, second, self.job)
        except NotAffineError as error:
            path.reason = str(error)  # which the notes of both runs cite
            for run in (first, second):
                self._keep_run(run, guards, target)
        return path

    def _same_program(self, target: Target, guards: GuardedCapability) -> Program | None:
        """Return the program of other GPUs that this one runs too. Where steps are alike, one suffices."""
        programs = list({id(path.program): path.program for path in self._paths if path.program}.values())
        if not programs:
            return None
        batch, is_whole = FIT_BATCHES[0], self.job.mode is not Mode.TRAIN or self.job.evaluate
        run = self._run(self.job if is_whole else replace(self.job, steps=1), batch, target, guards).trace
        expected = run if is_whole else first_step(run)
        for program in programs:
            other = with_target(program, target, batch, batch).specialize(batch, target)
            assert other is not None
            if not first_divergence(other if is_whole else first_step(other), expected):
                return program
            del program.targets[target.capability]
        return None

    def divergence(self, program: Program, batch: int, target: Target) -> str:
        """Return where a run differs from its program; "" where it does not."""
        target = _without_answers(target)
        run = self._run(self.job, batch, target, GuardedCapability(target.capability))
        expected = with_target(program, target, FIT_BATCHES[0], batch).specialize(batch, target)
        return "no variant" if expected is None else first_divergence(expected, run.trace)

    def _run(self, job: Job, batch: int, target: Target, guards: GuardedCapability) -> RecordedRun:
        major, minor = target.capability
        self.on_progress(f"tracing batch {batch} for compute capability {major}.{minor}")
        calls: list[RecordedCall] = []
        trace = record(
            job, batch, target.capability, self.build, None, calls, path_of=guards,
            sm_count=target.sm_count, conv_workspace_query=target.conv_workspace_query,
        )  # fmt: skip
        self.runs += 1
        return RecordedRun(trace, tuple(calls))


def _without_answers(target: Target) -> Target:
    """Return the target without what answers for convolutions: programs hold the convolutions themselves."""
    return replace(target, conv_workspace_query=None)


def with_target(program: Program, target: Target, min_batch: int, max_batch: int) -> Program:
    """Add GPUs of a compute capability to a program, or change the batch sizes for which it holds there."""
    variants = program.targets.get(target.capability)
    if variants is None:
        rules = program.rules
        assert isinstance(rules, SignatureRules)
        variants = program.targets[target.capability] = rules.variants(target, min_batch, max_batch)
    variants.min_batch, variants.max_batch = min_batch, max_batch
    return program


def _single_run(run: RecordedRun, job: Job, target: Target) -> Program:
    batch = run.trace.batch
    with suppress(NotAffineError):
        if job.compile is not Compile.NONE:
            raise NotAffineError("compiled code depends on the number of multiprocessors")
        again = replace(run, trace=replace(run.trace, batch=batch + 1))
        program = with_target(fit_program(run, again, job), target, batch, batch)
        specialized = program.specialize(batch, target)
        if specialized is not None and not first_divergence(specialized, run.trace):
            return program
    # Its kernels cannot be separated from the rest, so it holds for this number of SMs only.
    program = constant_program(run.trace, target)
    program.targets[target.capability].by_signature.append([constant_ops((), batch, target.sm_count)])
    return program


def open_builder(
    job: Job, on_progress: OnProgress, constructor: Callable[..., object] | None = None
) -> ProgramBuilder:
    """Return the builder of a job, or of the model that `constructor` makes for it.

    Imports the library of the job's model. Raises UsageError or ModelError.
    """
    construct = constructor or find_constructor(job)
    return ProgramBuilder(job, lambda job: construct_model(job, construct), on_progress)
