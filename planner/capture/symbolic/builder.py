"""Programs of one job for any GPU, from as few runs of its model as that takes.

Two runs are fitted to a program, which a third one validates; where sizes grow with the square of the batch
size, three. Where a job refuses such small batches, or goes another way from one to the next, units of more
samples are tried (`batch_units`). A program holds for every GPU on which the model takes
the same code path. A run records the comparisons with its compute capability as guards; where those do not
hold for another capability, one more run shows whether the path is the same.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from msgspec.structs import replace
from torch import nn

from planner.capture.capture_memory import CaptureMemory
from planner.capture.models.registry import construct_model, find_constructor
from planner.capture.session import record
from planner.capture.symbolic.batch_units import fit_in_units
from planner.capture.symbolic.capability_guards import GuardedCapability
from planner.capture.symbolic.fit_program import fit_program
from planner.capture.symbolic.kernel_calls import RecordedCall, RecordedRun
from planner.capture.symbolic.rules import SignatureRules
from planner.capture.symbolic.validate import (
    PAIR_VALIDATION_BYTES,
    STEP_VALIDATION_BYTES,
    VALIDATION_BYTES,
    find_valid_range,
    needs_batch_one,
)
from planner.errors import ModelError
from planner.jobs import Compile, Job, Mode
from planner.program import (
    FIT_BATCHES,
    NotAffineError,
    OnProgress,
    Program,
    SizesNotAffineError,
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
    refusal: ModelError | None = None  # of a batch size that programs are fitted to
    least: int = FIT_BATCHES[0]  # batch size of the program
    max_batch: int | None = None  # validated; None: not yet, 0: the program is wrong


@dataclass(slots=True)
class ProgramBuilder:
    """Captures the programs of a job; see `planner.program.ProgramBuilder`."""

    job: Job
    build: Callable[[Job], nn.Module]
    on_progress: OnProgress
    runs: int = 0  # of the model so far
    _paths: list[_Path] = field(default_factory=list)
    _memory: CaptureMemory = field(default_factory=CaptureMemory)
    _runs: dict[int, list[tuple[GuardedCapability, Program]]] = field(default_factory=dict)  # by batch size

    def programs(self, target: Target) -> tuple[Program, ...]:
        """Return the program for such GPUs, and a large job's run at batch 1, since small GPUs need it.

        None where two runs do not fit to a program, or a third one contradicts it. Raises the errors of a
        capture, save that a model may refuse batch 1, as batch norm does for single values.
        """
        if self.job.compile is not Compile.NONE:
            return ()  # inductor decides by sizes and by the number of multiprocessors
        given, target = target, _without_answers(target)
        path = self._path(target)
        if path.max_batch is None:
            self._validate(path, target)
            if not path.max_batch and (path.refusal is not None or self.job.mode is Mode.STEP):
                self._fit_in_units(path, target)
        if path.program is None or not path.max_batch:
            return ()
        programs = [with_target(path.program, target, path.least, path.max_batch)]
        if path.least == FIT_BATCHES[0] and needs_batch_one(path.program):
            with suppress(ModelError):
                programs.append(self.run(1, given))
        return tuple(programs)

    def fit(self, target: Target) -> Program | None:
        """Return the program for such GPUs before its range is validated; None where two runs fit to none.

        Raises the errors of a capture.
        """
        path = self._path(_without_answers(target))
        if path.refusal is not None:
            raise path.refusal
        if path.program is None or not path.program.is_affine:
            return None
        return with_target(path.program, target, *FIT_BATCHES)

    def run(self, batch: int, target: Target) -> Program:
        """Return the program of one run, which holds for its batch size. Raises the errors of a capture.

        One run serves all GPUs for which its guards hold, if its kernels can be separated from the rest. One
        beyond the range of the job's program that agrees with it widens the range.
        """
        for guards, program in self._runs.get(batch, []):
            if program.rules is not None and guards.guards_hold(target.capability):
                return with_target(program, target, batch, batch)
        guards = GuardedCapability(target.capability)
        run = self._run(self.job, batch, target, guards)
        for path in self._paths:
            if path.max_batch and batch > path.max_batch and path.guards.guards_hold(target.capability):
                fitted = path.program
                if fitted is not None and self._agrees(fitted, run, target):
                    path.max_batch = batch
                    return with_target(fitted, target, path.least, batch)
        return self._keep_run(run, guards, target)

    def enumerate_variants(self, program: Program, target: Target) -> None:
        """Evaluate the workspace rules at sample batch sizes and numbers of SMs."""
        if isinstance(program.rules, SignatureRules):
            program.rules.enumerate(program, target)

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
        same = self._same_path(target, guards)
        if same is not None:
            self._paths.append(same)
            return same
        path = _Path(guards, None)
        try:
            runs = [self._run(self.job, batch, target, guards) for batch in FIT_BATCHES]
        except ModelError as error:
            path.refusal, runs = error, []
        self._paths.append(path)
        if runs:
            self._fit(path, runs, target)
        return path

    def _fit(self, path: _Path, runs: list[RecordedRun], target: Target) -> None:
        """Fit runs to a program, and a third one where sizes ask for it."""
        try:
            try:
                path.program = fit_program(runs, self.job)
            except SizesNotAffineError:
                with suppress(ModelError):
                    runs.append(self._run(self.job, FIT_BATCHES[-1] + 1, target, path.guards))
                if len(runs) == len(FIT_BATCHES):
                    raise
                path.program = fit_program(runs, self.job)
        except NotAffineError as error:
            path.reason = str(error)  # which the notes of the runs cite
            for run in runs:
                self._keep_run(run, path.guards, target)

    def _validate(self, path: _Path, target: Target) -> None:
        program = path.program
        if program is None:
            path.max_batch = 0
            return
        others = (other for other in self._paths if other.program is program and other.max_batch is not None)
        same = next(others, None)
        if same is not None:
            path.max_batch = same.max_batch
            return
        is_step = self.job.mode is Mode.STEP
        tried_bytes: tuple[int, ...] = STEP_VALIDATION_BYTES if is_step else VALIDATION_BYTES
        if not program.is_affine and program.unit == 1:
            tried_bytes = PAIR_VALIDATION_BYTES
        path.max_batch = find_valid_range(
            program, lambda batch: self.divergence(program, batch, target), path.least, tried_bytes
        )

    def _fit_in_units(self, path: _Path, target: Target) -> None:
        """Fit runs in units of more samples than one. Raises the errors of a capture at the usual sizes."""

        def run(batch: int) -> RecordedRun:
            return self._run(self.job, batch, target, path.guards)

        def agrees(program: Program, run: RecordedRun) -> bool:
            return self._agrees(program, run, target)

        try:
            program, least = fit_in_units(run, agrees, self.job)
        except (ModelError, NotAffineError):
            if path.refusal is not None:
                raise path.refusal from None
            return
        program.notes = (*program.notes, _note_on_units(program.unit, least, path.refusal))
        path.program, path.least, path.max_batch = program, least, None
        self._validate(path, target)

    def _same_path(self, target: Target, guards: GuardedCapability) -> _Path | None:
        """Return a path with the program of other GPUs that this one runs too. Where steps are alike, one
        suffices.
        """
        paths = list({id(path.program): path for path in self._paths if path.program}.values())
        if not paths:
            return None
        batch, is_whole = paths[0].least, self.job.mode is not Mode.TRAIN or self.job.evaluate
        run = self._run(self.job if is_whole else replace(self.job, steps=1), batch, target, guards).trace
        expected = run if is_whole else first_step(run)
        for path in paths:
            program = path.program
            if program is None or batch % program.unit:
                continue
            other = with_target(program, target, batch, batch).specialize(batch, target)
            assert other is not None
            if not first_divergence(other if is_whole else first_step(other), expected):
                return _Path(guards, program, path.reason, path.refusal, path.least, path.max_batch)
            del program.targets[target.capability]
        return None

    def divergence(self, program: Program, batch: int, target: Target) -> str:
        """Return where a run differs from its program; "" where it does not."""
        target = _without_answers(target)
        run = self._run(self.job, batch, target, GuardedCapability(target.capability))
        return _divergence(program, run, target)

    def _agrees(self, program: Program, run: RecordedRun, target: Target) -> bool:
        """Return whether a run is as a program has it, whose range stays as it is."""
        before = program.targets.get(target.capability)
        least, most = (0, 0) if before is None else (before.min_batch, before.max_batch)
        try:
            return not _divergence(program, run, target)
        finally:
            with_target(program, target, least, most)

    def _run(self, job: Job, batch: int, target: Target, guards: GuardedCapability) -> RecordedRun:
        major, minor = target.capability
        self.on_progress(f"tracing batch {batch} for compute capability {major}.{minor}")
        calls: list[RecordedCall] = []
        trace = record(
            job, batch, target.capability, self.build, None, calls, path_of=guards,
            sm_count=target.sm_count, conv_workspace_query=target.conv_workspace_query, memory=self._memory,
        )  # fmt: skip
        self.runs += 1
        return RecordedRun(trace, tuple(calls))


def _divergence(program: Program, run: RecordedRun, target: Target) -> str:
    batch = run.trace.batch
    expected = with_target(program, target, program.unit, batch).specialize(batch, target)
    return "no variant" if expected is None else first_divergence(expected, run.trace)


def _note_on_units(unit: int, least: int, refusal: ModelError | None) -> str:
    if unit > 1:
        sizes = f"batch sizes that are tried are multiples of {unit}, from {least} on"
        why = "others take memory in jumps"
    else:
        sizes, why = f"batch sizes are tried from {least} on", "smaller ones take memory in jumps"
    return f"{sizes}: {why if refusal is None else str(refusal).rpartition('; ')[0]}"


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
        program = with_target(fit_program([run, again], job), target, batch, batch)
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
