"""Build the programs of one job for any GPU, from as few runs of its model as possible.

Two runs are fitted to a program, or three if sizes grow with the square of the batch size; a further run
validates it. If a job refuses these small batches, or takes another path from one batch size to the next,
units of several samples are tried (`batch_units`). A program holds for every GPU on which the model takes the
same code path. A run records the comparisons with its compute capability as guards. If the guards do not hold
for another capability, one more run shows whether the path is the same.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf

from msgspec.structs import replace
from torch import nn

from planner.capture.capture_memory import CaptureMemory
from planner.capture.models.registry import construct_model, find_constructor
from planner.capture.recorder.provenance import ProvenanceCollector
from planner.capture.session import record
from planner.capture.symbolic.batch_units import fit_in_units
from planner.capture.symbolic.capability_guards import GuardedCapability
from planner.capture.symbolic.deep_runs import LEAST_DEPTH, DeepRuns, open_deep_runs
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
    Capability,
    NotAffineError,
    NotRepeatedError,
    OnProgress,
    Program,
    SizesNotAffineError,
    Target,
    Trace,
    constant_ops,
    constant_program,
    first_divergence,
    first_step,
)

# A run that validates a program may allocate this many blocks for each event of the program.
_MOST_GROWTH = 4
_LEAST_MOST_BLOCKS = 10_000  # and at least this many blocks


@dataclass(slots=True)
class _Path:
    """A code path of a job: guards on the compute capability, and a program that holds if all guards hold."""

    guards: GuardedCapability
    program: Program | None  # None if the runs did not fit (`reason`) or the model refused them (`refusal`)
    reason: str = ""
    refusal: ModelError | None = None  # the model's error at a batch size to which programs are fitted
    least: int = FIT_BATCHES[0]  # smallest batch size of the program
    max_batch: int | None = None  # largest validated batch size; None before validation, 0 if none is valid


@dataclass(slots=True)
class ProgramBuilder:
    """A builder that captures the programs of a job; implements `planner.program.ProgramBuilder`."""

    job: Job
    build: Callable[[Job], nn.Module]
    on_progress: OnProgress
    runs: int = 0  # number of runs of the model
    _paths: list[_Path] = field(default_factory=list)
    _memory: CaptureMemory = field(default_factory=CaptureMemory)
    _deep_runs: DeepRuns | None = None  # None if the whole model must run
    _runs: dict[int, list[tuple[GuardedCapability, Program]]] = field(default_factory=dict)  # by batch size

    def programs(self, target: Target) -> tuple[Program, ...]:
        """Return the validated programs for a target, or () if each batch size needs a run of the model.

        The first program holds for a range of batch sizes. A large job also gets the program of batch size 1,
        which it may need on a small GPU. The result is () if no program fits the runs, if further runs
        contradict the program, or if the job is compiled. Raises the errors of a capture, except at batch
        size 1, which a model may refuse, as batch norm does for single values.
        """
        if self.job.model.compile is not Compile.NONE:
            return ()  # inductor decides by sizes and by the number of multiprocessors
        given, target = target, _without_query(target)
        path = self._path(target)
        if path.max_batch is None:
            self._validate(path, target)
            if not path.max_batch and (path.refusal is not None or self.job.loop.mode is Mode.STEP):
                self._fit_in_units(path, target)
        if path.program is None or not path.max_batch:
            return ()
        programs = [with_target(path.program, target, path.least, path.max_batch)]
        if path.least == FIT_BATCHES[0] and needs_batch_one(path.program):
            with suppress(ModelError):
                programs.append(self.run(1, given))
        return tuple(programs)

    def fit(self, target: Target) -> Program | None:
        """Return the target's program, affine in the batch size and not validated, or None if none fits.

        Raises the errors of a capture.
        """
        path = self._path(_without_query(target))
        if path.refusal is not None:
            raise path.refusal
        if path.program is None or not path.program.is_affine:
            return None
        return with_target(path.program, target, *FIT_BATCHES)

    def run(self, batch: int, target: Target) -> Program:
        """Return a program that holds at one batch size, from an earlier run or a new run of the model.

        Raises the errors of a capture. A run serves all GPUs for which its guards hold, if its kernels can be
        separated from the rest. If a run beyond the range of the job's program agrees with the program, the
        range is widened and the program is returned.
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

    def trace(self, batch: int, target: Target, provenance: ProvenanceCollector | None = None) -> Trace:
        """Return the trace of one run at a batch size.

        `on_progress` is not called. With `provenance`, the whole model runs, and the provenance of blocks is
        collected. Raises the errors of a capture.
        """
        if provenance is not None:
            return self._record(self.job, batch, target, target.capability, provenance=provenance)
        return self._run(self.job, batch, target, target.capability, with_calls=False).trace

    def enumerate_variants(self, program: Program, target: Target) -> None:
        """Add variants to a program by evaluating rules at selected batch sizes and multiprocessor counts."""
        if isinstance(program.rules, SignatureRules):
            program.rules.enumerate(program, target)

    def _keep_run(self, run: RecordedRun, guards: GuardedCapability, target: Target) -> Program:
        program = _single_run(run, self.job, target)
        reasons = [path.reason for path in self._paths if path.guards.guards_hold(target.capability)]
        if self.job.model.compile is not Compile.NONE:
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
        """Fit a path's program to two runs, or to three if needed.

        If no fit succeeds, the path's reason is set, and each run is kept as a program of its batch size.
        """
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
            path.reason = str(error)  # the notes of the runs cite it
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
        is_step = self.job.loop.mode is Mode.STEP
        tried_bytes: tuple[int, ...] = STEP_VALIDATION_BYTES if is_step else VALIDATION_BYTES
        if not program.is_affine and program.unit == 1:
            tried_bytes = PAIR_VALIDATION_BYTES
        path.max_batch = find_valid_range(
            program, lambda batch: self.divergence(program, batch, target), path.least, tried_bytes
        )

    def _fit_in_units(self, path: _Path, target: Target) -> None:
        """Fit a path's program in units of several samples, and validate it.

        If no unit fits, raises the error that the model raised at the usual batch sizes, if it raised an
        error.
        """

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
        """Return a new path that reuses a program of other GPUs, or None if no program agrees.

        Programs are compared with one run on the target. In training without evaluation, a run of one step is
        enough, since steps are alike.
        """
        paths = list({id(path.program): path for path in self._paths if path.program}.values())
        if not paths:
            return None
        batch, is_whole = paths[0].least, self.job.loop.mode is not Mode.TRAIN or self.job.loop.evaluate
        run = self._run(self.job if is_whole else self.job.replace(steps=1), batch, target, guards).trace
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
        """Return a description of the first difference between a program and a new run, or "" if they agree.

        Raises BatchTooLargeError for a run that allocates many times the blocks of the program, as a step
        does that works through its batch in a loop.
        """
        target = _without_query(target)
        self._memory.most_blocks = max(_LEAST_MOST_BLOCKS, _MOST_GROWTH * len(program.events))
        try:
            run = self._run(self.job, batch, target, GuardedCapability(target.capability))
        finally:
            self._memory.most_blocks = inf
        return _divergence(program, run, target)

    def _agrees(self, program: Program, run: RecordedRun, target: Target) -> bool:
        """Return whether a run agrees with a program, without changing the program's range."""
        before = program.targets.get(target.capability)
        least, most = (0, 0) if before is None else (before.min_batch, before.max_batch)
        try:
            return not _divergence(program, run, target)
        finally:
            with_target(program, target, least, most)

    def _run(
        self, job: Job, batch: int, target: Target, path_of: Capability, *, with_calls: bool = True
    ) -> RecordedRun:
        if with_calls:
            major, minor = target.capability
            self.on_progress(f"tracing batch {batch} for compute capability {major}.{minor}")
        self.runs += 1

        def run(each: Job) -> RecordedRun:
            calls: list[RecordedCall] = []
            memory = self._memory if each is job else CaptureMemory()
            trace = self._record(each, batch, target, path_of, calls if with_calls else None, memory)
            if memory.first_read is not None and each is not job:
                raise NotRepeatedError("values of a shallow model are not those of the deep model")
            return RecordedRun(trace, tuple(calls))

        deep = None if self._deep_runs is None else self._deep_runs.run(job, target, run)
        return run(job) if deep is None else deep

    def _record(
        self,
        job: Job,
        batch: int,
        target: Target,
        path_of: Capability,
        calls: list[RecordedCall] | None = None,
        memory: CaptureMemory | None = None,
        provenance: ProvenanceCollector | None = None,
    ) -> Trace:
        return record(
            job, batch, target.capability, self.build, provenance, calls, path_of=path_of,
            sm_count=target.sm_count, conv_workspace_query=target.conv_workspace_query, memory=memory,
        )  # fmt: skip


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


def _without_query(target: Target) -> Target:
    """Return the target without its query of convolution workspaces.

    Programs keep the convolutions instead.
    """
    return replace(target, conv_workspace_query=None)


def with_target(program: Program, target: Target, min_batch: int, max_batch: int) -> Program:
    """Set the range of batch sizes for which a program holds on a target, and return the program.

    Targets of equal compute capability share the range.
    """
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
        if job.model.compile is not Compile.NONE:
            raise NotAffineError("compiled code depends on the number of multiprocessors")
        again = replace(run, trace=replace(run.trace, batch=batch + 1))
        program = with_target(fit_program([run, again], job), target, batch, batch)
        specialized = program.specialize(batch, target)
        if specialized is not None and not first_divergence(specialized, run.trace):
            return program
    # The run's kernels cannot be separated from the rest, so the program holds for this number of SMs only.
    program = constant_program(run.trace, target)
    program.targets[target.capability].by_signature.append([constant_ops((), batch, target.sm_count)])
    return program


def open_builder(
    job: Job,
    on_progress: OnProgress,
    constructor: Callable[..., object] | None = None,
    least_depth: int = LEAST_DEPTH,
) -> ProgramBuilder:
    """Return a builder of a job's programs.

    `constructor` makes the model if it is not None. Runs of models with `least_depth` equal blocks or more
    are extrapolated from shallow models, unless `constructor` is given. Imports the library of the job's
    model. Raises UsageError or ModelError.
    """
    construct = constructor or find_constructor(job)
    deep_runs = open_deep_runs(job, least_depth) if constructor is None else None
    return ProgramBuilder(job, lambda job: construct_model(job, construct), on_progress, _deep_runs=deep_runs)
