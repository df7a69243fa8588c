"""Tracing: the only folder of `planner` that imports torch."""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn, optim

from planner.capture.compiled import CompiledCalls, watch_compiled
from planner.capture.cuda.devices import Placement, devices_shown, planned_device
from planner.capture.cuda.rnn import flatten_weights
from planner.capture.cuda.semantics import cuda_semantics
from planner.capture.cudnn_target import equip, notes_on_cudnn
from planner.capture.failure_reasons import explain, source_line
from planner.capture.loop.batches import detection_batch, is_detector
from planner.capture.loop.criterion import Criterion, build_criterion
from planner.capture.loop.formats import with_own_types
from planner.capture.loop.precision import convert_model, meta_machine
from planner.capture.loop.trainable import choose_trained
from planner.capture.loop.training_loop import Fetch, empty_batch, run_loop, with_few_micro_batches
from planner.capture.meta_kernels.reductions import run_on_meta
from planner.capture.models.lazy import initialise_lazy_modules
from planner.capture.models.live_optimizer import make_optimizer
from planner.capture.models.meta_init import tensors_put_on_gpu
from planner.capture.models.registry import build_model, complete_by_library
from planner.capture.models.transformers.build import is_padded, notes_of
from planner.capture.models.transformers.masks import known_values
from planner.capture.process_state import left_clean
from planner.capture.recorder.growth_sources import growth_sources
from planner.capture.recorder.provenance import Details
from planner.capture.recorder.recorder import Recorder, Run
from planner.capture.symbolic.kernel_calls import Calls
from planner.capture.values.interpreter import Values, ValuesNeededError
from planner.capture.values.packed_lengths import full_lengths
from planner.capture.values.reads import Reading, take_reading
from planner.capture.values.with_values import built_with_values, values_kept
from planner.errors import BatchTooLargeError, PlannerError
from planner.jobs import Job, Mode
from planner.program import Category, Phase, Target, Trace

__all__ = ["trace"]


def trace(
    job: Job,
    batch: int,
    capability: tuple[int, int],
    build: Callable[[Job], nn.Module] = build_model,
    details: Details | None = None,
    calls: Calls | None = None,
    path_of: tuple[int, int] | None = None,
    multiprocessors: int | None = None,
) -> Trace:
    """The events of the job's first steps at this batch size on a GPU of this compute capability.

    `build` makes the model with its parameters on meta; `details`, if given, collects those of the blocks,
    which takes time, `calls` those of operators with rules; `path_of` stands for the capability wherever it
    decides which operators run. Without `multiprocessors` it is for the largest such GPU. Raises UsageError
    for a model that its source does not know, ModelError where it cannot be built, does not accept its
    inputs, or reads values of tensors that a run on the CPU cannot give.
    """
    path_of = capability if path_of is None else path_of
    taken = _trace(job, batch, capability, build, details, calls, path_of, multiprocessors)
    if not taken.growth_sources or details is not None:
        return taken
    # The lines behind what grows take a second run, since looking for them takes time.
    again = _trace(job, batch, capability, build, Details(), None, path_of, multiprocessors)
    return replace(taken, growth_sources=again.growth_sources)


@left_clean()
def _trace(
    job: Job,
    batch: int,
    capability: tuple[int, int],
    build: Callable[[Job], nn.Module],
    details: Details | None,
    calls: Calls | None,
    path_of: tuple[int, int],
    multiprocessors: int | None,
) -> Trace:
    job = complete_by_library(job)

    def take(model: nn.Module, run: Run, size: int = batch) -> Trace:
        initialise_lazy_modules(model, job, size, run)
        return _take(
            job,
            model,
            size,
            Recorder(
                model,
                equip(Target.for_capability(capability, multiprocessors), job),
                details,
                calls,
                run,
                job.cublas_workspace_config,
            ),
            path_of,
        )

    try:
        with planned_device(capability=path_of) as placement:
            return _with_notes(take(build(job), run_on_meta), placement)
    except ValuesNeededError as error:
        first = error

    def take_with_values(size: int, how: Reading) -> Trace:
        if calls is not None:
            calls.found.clear()
        with planned_device(capability=path_of) as placement, values_kept():
            with built_with_values() as known:
                model = build(job)
            values = Values(known, how.most_bytes, how.answers, how.noted)
            taken = _with_notes(take(model, values.run, size), placement)
        return replace(taken, notes=(*taken.notes, *first.notes(values)))

    return take_reading(batch, take_with_values)


def _with_notes(taken: Trace, placement: Placement) -> Trace:
    return replace(taken, notes=(*taken.notes, *placement.notes))


def _take(job: Job, model: nn.Module, batch: int, recorder: Recorder, path_of: tuple[int, int]) -> Trace:
    model = convert_model(model, job)
    choose_trained(model, job)
    job = with_own_types(job)
    compiled = CompiledCalls()
    try:
        with (
            cuda_semantics(path_of),
            known_values(padded=is_padded(job)),
            devices_shown(),
            full_lengths() as lengths,
            recorder.watching_modules(),
            _without_collector(),
            watch_compiled(compiled),
        ):
            notes = _run(job, model, batch, recorder)
            taken = recorder.finish(
                batch,
                (
                    *notes_of(job, model),
                    *notes,
                    *compiled.notes(),
                    *lengths,
                    *notes_on_cudnn(job, recorder.capability),
                ),
            )
            return replace(taken, growth_sources=growth_sources(taken, batch, recorder))
    except BatchTooLargeError as error:
        where = f"{job.model}: {recorder.place()} at batch {batch}{source_line(error)}"
        raise BatchTooLargeError(f"{where}: {error}; take that call out of the traced path") from error
    except (PlannerError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a model may raise anything
        raise explain(job, batch, recorder, error) from error


def _run(job: Job, model: nn.Module, batch: int, recorder: Recorder) -> tuple[str, ...]:
    recorder.mark(0, Phase.SETUP)
    for plain in tensors_put_on_gpu(model):
        recorder.adopt(plain, Category.PARAMETER, "", "to")
    for name, module in _in_order_of_apply(model):
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                recorder.adopt(tensor, Category.PARAMETER, name, "to")
        for buffer in flatten_weights(module):
            recorder.adopt(buffer, Category.PARAMETER, name, "flatten_parameters")
    criterion = build_criterion(job)
    parameters = [*model.parameters(), *_adopt_criterion(criterion, recorder)]
    if criterion is not None and not criterion.takes_target:
        job = replace(job, target=None, targets=())
    with recorder:
        optimizer = None
        if job.mode is Mode.TRAIN:
            optimizer = make_optimizer(model, job, parameters)

        def on_phase(step: int, phase: Phase) -> None:
            _label(recorder, parameters, optimizer)
            recorder.mark(step, phase)

        machine = replace(meta_machine(job), label=recorder.label, criterion=criterion)
        evaluated = _batches(model, job, job.eval_batch) if job.eval_batch else None
        fetch = _batches(model, job, batch)
        short, notes = with_few_micro_batches(job)
        notes = (*run_loop(model, short, fetch, optimizer, on_phase, machine, evaluated), *notes)
    return notes if criterion is None else (*notes, *criterion.notes())


def _adopt_criterion(criterion: Criterion | None, recorder: Recorder) -> Iterator[nn.Parameter]:
    """Record what a loss of its own holds, and give its parameters."""
    module = None if criterion is None else criterion.module
    if module is not None:
        name = type(module).__name__
        for tensor in (*module.parameters(), *module.buffers()):
            recorder.adopt(tensor, Category.PARAMETER, name, "to")
        yield from module.parameters()


def _batches(model: nn.Module, job: Job, batch: int) -> Fetch:
    if is_detector(model):
        return lambda: detection_batch(model, job, batch, "meta")
    return lambda: empty_batch(job, batch, "meta")


def _label(recorder: Recorder, parameters: Iterable[nn.Parameter], optimizer: optim.Optimizer | None) -> None:
    """Tell the recorder which blocks hold gradients and optimizer state by now."""
    if optimizer is None:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            recorder.label(parameter.grad, Category.GRADIENT)
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                recorder.label(value, Category.OPTIMIZER)


def _in_order_of_apply(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Modules in the order in which `Module.to` moves what they hold: children first."""
    for name, child in model.named_children():
        yield from _in_order_of_apply(child, f"{prefix}.{name}" if prefix else name)
    yield prefix, model


@contextmanager
def _without_collector() -> Iterator[None]:
    """Garbage in cycles is collected at times that are not the same in two traces; here it is not."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
