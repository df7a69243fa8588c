"""Capture the training loop of a job on `meta` as a trace."""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor, nn

from planner.capture.compiled import CompiledCalls, watch_compiled
from planner.capture.cuda.backend_settings import notes_on_settings
from planner.capture.cuda.devices import Placement, devices_shown, names_of_torch, planned_device
from planner.capture.cuda.host_tensors import Side
from planner.capture.cuda.optimizer_libraries import optimizer_libraries
from planner.capture.cuda.semantics import Suspended, cuda_semantics
from planner.capture.cuda.torchao_kernels import torchao_kernels
from planner.capture.distributed.pipeline import Stages
from planner.capture.distributed.sharding import check_rank, rank_count, shard_model, with_last_synced
from planner.capture.failure_reasons import explain, source_line
from planner.capture.loop.batches import batch_loader
from planner.capture.loop.criterion import Criterion, build_criterion
from planner.capture.loop.named_optimizers import AnyOptimizer, prepare_optimizer, state_tensors
from planner.capture.loop.own_step import run_own_steps, run_trainer
from planner.capture.loop.precision import convert_inputs, convert_model, meta_runtime
from planner.capture.loop.runtime import Batch
from planner.capture.loop.trainable import freeze_parameters
from planner.capture.loop.training_loop import run_loop, with_few_micro_batches
from planner.capture.meta_kernels.run import MetaRunner
from planner.capture.models.accelerate_state import own_accelerate_state
from planner.capture.models.adapters import attach_adapters
from planner.capture.models.lazy import initialise_lazy_modules
from planner.capture.models.libraries import quiet
from planner.capture.models.liger import liger_kernels
from planner.capture.models.live import evaluated_loader
from planner.capture.models.live_optimizer import optimizer_maker
from planner.capture.models.offline import offline_library
from planner.capture.models.own_step import StepModule
from planner.capture.models.quantized import notes_on_quantized, quantize_linears, quantize_on_meta
from planner.capture.models.registry import build_model, complete_by_library
from planner.capture.models.torchao_weights import prepare_quantization
from planner.capture.models.transformers.build import is_padded, notes_of
from planner.capture.models.transformers.masks import assume_padding
from planner.capture.models.transformers.own_trainer import TrainerModule
from planner.capture.process_state import preserve_process_state, raise_interrupt
from planner.capture.recorder.growth_sources import growth_sources
from planner.capture.recorder.provenance import ProvenanceCollector
from planner.capture.recorder.recorder import Recorder, Run
from planner.capture.setup import record_setup
from planner.capture.symbolic.kernel_calls import RecordedCall
from planner.capture.values.deterministic import construct_with_buffers, deterministic_values
from planner.capture.values.interpreter import DataDependentError, ValueInterpreter
from planner.capture.values.packed_lengths import full_lengths
from planner.capture.values.python_random import watch_python_random
from planner.capture.values.reads import ReadLog, ReadPolicy, run_with_reads
from planner.capture.workspaces.tensor.fft import notes_on_transforms
from planner.capture.workspaces.tensor.linalg import notes_on_factorizations
from planner.errors import BatchTooLargeError, PlannerError, UsageError
from planner.jobs import Compile, Job, Mode, Quantize
from planner.program import (
    Category,
    ConvWorkspaceQuery,
    GrowthSource,
    Phase,
    Target,
    Trace,
    has_convolutions,
    torch_version_of,
)


@dataclass(slots=True)
class CaptureMemory:
    """Remember what captures at some batch sizes show of a job's reads of values and of the lines behind its
    growing memory, for those at others.
    """

    first_read: DataDependentError | None = None  # where shapes alone did not do
    logs: dict[int, ReadLog] = field(default_factory=dict)  # of small batch sizes
    growth_lines: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)  # by module, operator

    def with_line(self, growth: GrowthSource) -> GrowthSource:
        """Return the source of growing memory with its line of code."""
        source, code = self.growth_lines.get((growth.module, growth.op), ("", ""))
        return replace(growth, source=source, code=code)


def record(
    job: Job,
    batch: int,
    capability: tuple[int, int],
    build: Callable[[Job], nn.Module] = build_model,
    provenance: ProvenanceCollector | None = None,
    calls: list[RecordedCall] | None = None,
    path_of: tuple[int, int] | None = None,
    sm_count: int | None = None,
    conv_workspace_query: ConvWorkspaceQuery | None = None,
    memory: CaptureMemory | None = None,
) -> Trace:
    """Return the trace of the job's first steps at this batch size on a GPU of this compute capability.

    `build` makes the model with its parameters on meta. `provenance` collects that of the blocks, which takes
    time, `calls` those of operators with rules. `path_of` replaces the capability wherever it decides which
    operators run. Without `sm_count` the GPU is the largest of its capability; without
    `conv_workspace_query` convolutions take no workspace. `memory` is of other batch sizes of the same job,
    and gets what this one shows of its reads. Raises UsageError for a model that its source does
    not know, ModelError where it cannot be built, does not accept its inputs, or reads values of tensors that
    a run on the CPU cannot give.
    """
    target = replace(
        Target.for_capability(capability, sm_count),
        conv_workspace_query=conv_workspace_query,
        torch=torch_version_of(job.torch),
    )
    memory = CaptureMemory() if memory is None else memory
    session = _Session(job, target, path_of or capability, build, provenance, calls, memory, Stages())
    trace = session.run(batch)
    if conv_workspace_query is not None and has_convolutions(trace):
        trace = replace(trace, conv_workspace_source=conv_workspace_query.source(capability))
    if not trace.growth_sources or provenance is not None:
        return trace
    if any((one.module, one.op) not in memory.growth_lines for one in trace.growth_sources):
        # The lines behind growing memory take a second run, since finding them takes time.
        again = replace(session, provenance=ProvenanceCollector(), calls=None).run(batch)
        memory.growth_lines.update(
            ((one.module, one.op), (one.source, one.code)) for one in again.growth_sources
        )
    return replace(trace, growth_sources=tuple(map(memory.with_line, trace.growth_sources)))


class BatchOnHostError(PlannerError):
    """A step of the user's own used its batch without moving it to the GPU."""


BATCH_ON_GPU_NOTE = (
    "its step does not move the batch, which is planned on the GPU, as from a loader that moves it"
)


class _Session(Struct, frozen=True):
    job: Job
    target: Target
    path_of: tuple[int, int]
    build: Callable[[Job], nn.Module]
    provenance: ProvenanceCollector | None
    calls: list[RecordedCall] | None
    memory: CaptureMemory
    stages: Stages
    loads_to_gpu: bool = False  # the batches of a step of the user's own

    def run(self, batch: int) -> Trace:
        """Capture the rank of the job, after those on whose answers the stages of its pipeline wait."""

        def run_rank(rank: int) -> Trace:
            if self.calls is not None:
                self.calls.clear()
            return replace(self, job=replace(self.job, rank=rank))._run_rank(batch)

        return self.stages.trace(self.job.rank, run_rank)

    def _run_rank(self, batch: int) -> Trace:
        """Capture with batches on the CPU where a step of the user's own moves them, else on the GPU."""
        starts_anew = self.job.mode is Mode.STEP
        try:
            with own_accelerate_state(starts_anew):
                return self._run(batch)
        except BatchOnHostError:
            if self.calls is not None:
                self.calls.clear()
            with own_accelerate_state(starts_anew):
                trace = replace(self, loads_to_gpu=True)._run(batch)
            return replace(trace, notes=(*trace.notes, BATCH_ON_GPU_NOTE))

    @preserve_process_state()
    def _run(self, batch: int) -> Trace:
        """Capture with shapes alone; a model that reads values is captured with values, if need be again."""
        with offline_library(self.job):
            return self._run_offline(batch)

    def _run_offline(self, batch: int) -> Trace:
        job = complete_by_library(self.job)
        prepare_optimizer(job)
        prepare_quantization(job)
        if job.deepspeed:
            from planner.capture.distributed.deepspeed_process import import_deepspeed

            import_deepspeed()
        first_read = self.memory.first_read
        if first_read is None:
            try:
                with planned_device(capability=self.path_of) as placement, self._ranks(placement):
                    return self._capture(job, self.build(job), batch, MetaRunner(self.path_of).run, placement)
            except DataDependentError as error:
                first_read = self.memory.first_read = error.with_traceback(None)

        def run_with_values(size: int, policy: ReadPolicy) -> Trace:
            if self.calls is not None:
                self.calls.clear()
            with (
                planned_device(capability=self.path_of, has_values=True) as placement,
                self._ranks(placement),
                deterministic_values(),
            ):
                with construct_with_buffers() as buffers:
                    model = self.build(job)
                values = ValueInterpreter(self.path_of, buffers, policy)
                buffers.clear()  # a tensor that the step replaces is freed
                trace = self._capture(job, model, size, values.run, placement)
            return replace(trace, notes=(*trace.notes, *first_read.notes(values)))

        is_step = job.mode is Mode.STEP
        return run_with_reads(batch, run_with_values, self.memory.logs, guesses_numbers=is_step)

    def _ranks(self, placement: Placement) -> AbstractContextManager[None]:
        if self.job.deepspeed:
            from planner.capture.distributed.deepspeed_process import deepspeed_process

            return deepspeed_process(self.job.world_size, placement)
        if self.job.fsdp_arg and not self.job.fsdp:
            raise UsageError("--fsdp-arg without --fsdp: give the number of ranks, such as --fsdp 8")
        if not self.job.fsdp and not self.job.tp:
            is_one = not self.job.world_size and not self.job.rank
            return nullcontext() if is_one else self._rank_of_file(placement)
        from planner.capture.distributed.process_group import process_group

        check_rank(self.job)
        ranks = rank_count(self.job)
        return process_group(
            ranks, placement.streams, lambda tensor: placement.on_resize(tensor), self.job.rank
        )

    @contextmanager
    def _rank_of_file(self, placement: Placement) -> Iterator[None]:
        from planner.capture.distributed.process_group import process_group
        from planner.capture.distributed.user_code import as_launched, check_launched

        check_launched(self.job)
        ranks, rank = self.job.world_size, self.job.rank
        with (
            process_group(ranks, placement.streams, lambda tensor: placement.on_resize(tensor), rank),
            as_launched(ranks, rank, self.stages),
        ):
            yield

    def _capture(self, job: Job, model: nn.Module, batch: int, run: Run, placement: Placement) -> Trace:
        initialise_lazy_modules(model, job, batch, run)
        tuned = {"--peft": job.peft, "--quantize": job.quantize is not Quantize.NONE, "--liger": job.liger}
        given = next((option for option, is_given in tuned.items() if is_given), "")
        if isinstance(model, StepModule) and given:
            raise UsageError(
                f"{job.model}: {given} changes no model of a step of your own; do it in the file"
            )
        with quiet():  # diffusers advises against conversions
            model = quantize_linears(convert_model(model, job), job)
        loaded = quantize_on_meta(model)
        model = attach_adapters(model, job)
        recorder = Recorder(
            model,
            self.target,
            self.provenance,
            self.calls,
            run,
            job.cublas_workspace_config,
            placement.host,
            placement.streams,
        )
        placement.on_empty_cache = recorder.record_empty_cache
        placement.on_resize = recorder.record_resize
        placement.graphs.open_pool = recorder.graph_pool
        freeze_parameters(model, job)
        sharded = shard_model(model, job, recorder) if job.fsdp or job.tp else ()
        with liger_kernels(model, job):
            trace = _record_loop(
                convert_inputs(job), model, batch, recorder, self.path_of, loaded, self.loads_to_gpu
            )
        return replace(trace, notes=(*trace.notes, *sharded, *placement.notes))


def _record_loop(
    job: Job,
    model: nn.Module,
    batch: int,
    recorder: Recorder,
    path_of: tuple[int, int],
    loaded: dict[int, list[Tensor]],
    loads_to_gpu: bool,
) -> Trace:
    try:
        with (
            cuda_semantics(path_of, recorder.target.torch) as without_semantics,
            assume_padding(is_padded(job)),
            devices_shown(),
            torchao_kernels(),
            full_lengths() as lengths,
            _without_garbage_collection(),
            _calls_watched(job, recorder, without_semantics) as compiled,
            watch_python_random() as notes_on_random,
        ):
            if isinstance(model, StepModule):
                of_loop = _run_own_steps(model, job, batch, recorder, loaded, loads_to_gpu)
            elif job.deepspeed:
                from planner.capture.distributed.zero import run_zero

                of_loop = run_zero(job, model, batch, recorder)
            else:
                of_loop = _run(job, model, batch, recorder, loaded)
            notes = (
                *notes_of(job, model),
                *notes_on_quantized(job, model),
                *of_loop,
                *compiled(),
                *lengths,
                *notes_on_random(),
                *notes_on_transforms(recorder.operators()),
                *notes_on_factorizations(recorder.operators()),
                *notes_on_settings(job),
            )
            trace = recorder.finish(batch, notes)
            return replace(trace, growth_sources=growth_sources(trace, recorder))
    except BatchTooLargeError as error:
        where = f"{job.model}: {recorder.place()} at batch {batch}{source_line(error)}"
        raise BatchTooLargeError(f"{where}: {error}; take that call out of the traced path") from error
    except (PlannerError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a model may raise anything
        raise_interrupt(error)
        raise explain(job, batch, recorder, error) from error


@contextmanager
def _calls_watched(
    job: Job, recorder: Recorder, without_semantics: Suspended
) -> Iterator[Callable[[], tuple[str, ...]]]:
    """Track modules, or compile them where the job does, since compiled code runs none; yields the notes."""
    if job.compile is Compile.NONE:
        calls = CompiledCalls()
        with recorder.modules.tracking(), watch_compiled(calls):
            yield calls.notes
        return

    @contextmanager
    def suspended() -> Iterator[None]:
        with without_semantics(), names_of_torch():
            yield

    with suspended():  # dynamo and inductor note torch's functions as they find them
        from planner.capture.inductor.compiler import Compiler, learn_names_of_torch  # takes seconds

        learn_names_of_torch()
    compiler = Compiler(recorder, suspended)
    with compiler.installed():
        yield compiler.notes


def _run(
    job: Job, model: nn.Module, batch: int, recorder: Recorder, loaded: dict[int, list[Tensor]]
) -> tuple[str, ...]:
    recorder.start_phase(0, Phase.SETUP)
    record_setup(model, job, recorder, loaded)
    criterion = build_criterion(job)
    parameters = [*model.parameters(), *_record_criterion(criterion, recorder)]
    if criterion is not None and not criterion.takes_target:
        job = replace(job, target=None, targets=())
    make = optimizer_maker(model, job) if job.mode is Mode.TRAIN else None
    with optimizer_libraries(recorder.target.capability) as outside, recorder:
        optimizer = None if make is None else make(model, parameters)

        def on_phase(step: int, phase: Phase) -> None:
            if optimizer is not None:
                _set_categories(recorder, parameters, optimizer)
            if job.fsdp:  # which may have copied its parts
                for parameter in parameters:
                    recorder.set_category(parameter, Category.PARAMETER)
            recorder.start_phase(step, phase)

        runtime = replace(meta_runtime(job), set_category=recorder.set_category, criterion=criterion)
        load_evaluated = evaluated_loader(model, batch)
        if load_evaluated is None and job.eval_batch:
            load_evaluated = batch_loader(model, job, job.eval_batch)
        load_batch = batch_loader(model, job, batch)
        short, notes = with_few_micro_batches(job)
        load_batch = with_last_synced(load_batch, model, short)
        notes = (*run_loop(model, short, load_batch, optimizer, on_phase, runtime, load_evaluated), *notes)
        notes += outside.notes()
    return notes if criterion is None else (*notes, *criterion.notes())


def _run_own_steps(
    model: StepModule,
    job: Job,
    batch: int,
    recorder: Recorder,
    loaded: dict[int, list[Tensor]],
    loads_to_gpu: bool,
) -> tuple[str, ...]:
    recorder.start_phase(0, Phase.SETUP)
    _record_own_setup(model, job, recorder, loaded)

    def on_phase(step: int, phase: Phase) -> None:
        _set_gradients(recorder, model.parameters())  # of which no optimizer may know
        for optimizer in model.optimizers:
            held = [one for group in optimizer.param_groups for one in group["params"]]
            _set_categories(recorder, held, optimizer)
        recorder.start_phase(step, phase)

    load_batch = batch_loader(model, job, batch)

    def load() -> Batch:
        with recorder.host.moving_to(Side.GPU if loads_to_gpu else Side.HOST):
            return load_batch()

    with optimizer_libraries(recorder.target.capability) as outside, recorder:
        if isinstance(model, TrainerModule):
            return (*run_trainer(model, job, batch, on_phase), *outside.notes())
        try:
            return (*run_own_steps(model, job, load, on_phase), *outside.notes())
        except Exception as error:
            if not recorder.host.have_met or loads_to_gpu:
                raise
            raise BatchOnHostError(f"{job.model}: its step does not move its batch to the GPU") from error


def _record_own_setup(
    model: StepModule, job: Job, recorder: Recorder, loaded: dict[int, list[Tensor]]
) -> None:
    """Record what a step holds before its first call.

    No variable of a function that goes on may name one of these tensors: the step may replace it by another,
    which frees it.
    """
    if isinstance(model, TrainerModule):
        for tensor in model.tensors_on_host():
            recorder.host.add(tensor)
    record_setup(model, job, recorder, loaded)
    model.held_tensors.clear()
    for optimizer in model.optimizers:  # some make their state at once
        for tensor in state_tensors(optimizer):
            recorder.record_tensor(tensor, Category.OPTIMIZER, "state")


def _record_criterion(criterion: Criterion | None, recorder: Recorder) -> Iterator[nn.Parameter]:
    """Record the tensors of the job's own loss, and yield its parameters."""
    module = None if criterion is None else criterion.module
    if module is not None:
        name = type(module).__name__
        for tensor in (*module.parameters(), *module.buffers()):
            recorder.record_tensor(tensor, Category.PARAMETER, "to", name)
        yield from module.parameters()


def _set_categories(recorder: Recorder, parameters: list[nn.Parameter], optimizer: AnyOptimizer) -> None:
    """Set the categories of blocks that hold gradients and optimizer state by now."""
    _set_gradients(recorder, parameters)
    for tensor in state_tensors(optimizer):
        recorder.set_category(tensor, Category.OPTIMIZER)


def _set_gradients(recorder: Recorder, parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            recorder.set_category(parameter.grad, Category.GRADIENT)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable the garbage collector while open: it frees cycles at times that differ between traces.

    A collection within, of what the loop made, does not look through torch's million objects.
    """
    was_enabled, freezes = gc.isenabled(), not gc.get_freeze_count()
    gc.disable()
    if freezes:
        gc.freeze()
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()
        if was_enabled:
            gc.enable()
