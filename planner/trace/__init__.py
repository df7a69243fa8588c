"""Tracing: the only folder of `planner` that imports torch."""

import gc
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn, optim

from planner.errors import ModelError, PlannerError
from planner.events import Phase, Role, Trace
from planner.job import Job, Mode
from planner.trace.cuda import cuda_semantics
from planner.trace.optimizers import build_optimizer
from planner.trace.precision import convert_model, meta_machine
from planner.trace.recorder import Recorder
from planner.trace.sources import build_model
from planner.trace.step import empty_batch, run_loop

__all__ = ["trace"]


def trace(
    job: Job, batch: int, capability: tuple[int, int], build: Callable[[Job], nn.Module] = build_model
) -> Trace:
    """The events of the job's first steps at this batch size on a GPU of this compute capability.

    `build` makes the model with its parameters on meta. Raises UsageError for a model that its source does
    not know, ModelError where it cannot be built, does not accept its inputs, or reads values of tensors.
    """
    model = convert_model(build(job), job)
    recorder = Recorder(model, capability)
    try:
        with cuda_semantics(capability), recorder.watching_modules(), _without_collector():
            _run(job, model, batch, recorder)
            return recorder.finish(batch)
    except PlannerError:
        raise
    except (Exception, SystemExit) as error:
        raise ModelError(_explain(job, batch, recorder, error)) from error


def _run(job: Job, model: nn.Module, batch: int, recorder: Recorder) -> None:
    recorder.mark(0, Phase.SETUP)
    for module, tensor in _in_order_of_apply(model):
        recorder.adopt(tensor, Role.PARAMETER, module, "to")
    with recorder:
        optimizer = None
        if job.mode is Mode.TRAIN:
            optimizer = build_optimizer(job.optimizer, job.optimizer_impl, model.parameters())

        def on_phase(step: int, phase: Phase) -> None:
            _label(recorder, model, optimizer)
            recorder.mark(step, phase)

        run_loop(model, job, lambda: empty_batch(job, batch, "meta"), optimizer, on_phase, meta_machine(job))


def _label(recorder: Recorder, model: nn.Module, optimizer: optim.Optimizer | None) -> None:
    """Tell the recorder which blocks hold gradients and optimizer state by now."""
    if optimizer is None:
        return
    for parameter in model.parameters():
        if parameter.grad is not None:
            recorder.label(parameter.grad, Role.GRADIENT)
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                recorder.label(value, Role.OPTIMIZER)


def _in_order_of_apply(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers in the order in which `Module.to` moves them: children first, then its own."""
    for name, child in model.named_children():
        yield from _in_order_of_apply(child, f"{prefix}.{name}" if prefix else name)
    for tensor in (*model._parameters.values(), *model._buffers.values()):
        if tensor is not None:
            yield prefix, tensor


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


# Operators whose result, or the shape of it, depends on values that a trace on meta does not have.
_READS_VALUES = re.compile(
    r"_local_scalar_dense|nonzero|nms|unique|masked_select|\.equal|is_nonzero|bincount|repeat_interleave"
)


def _explain(job: Job, batch: int, recorder: Recorder, error: BaseException) -> str:
    """One line: the module and operator that failed, the source line that called it, and what to do."""
    place, running, line = recorder.place(), recorder.running or "", _source_line(error)
    if _READS_VALUES.search(running) or "nonzero" in str(error):
        return (
            f"{job.model}: {place} calls {running}{line}, which reads values of tensors; "
            "a plan has shapes only: take that call out of the traced path"
        )
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, SystemExit):
        text = f"it ends the process with code {error.code}"
    text = text if len(text) <= 200 else text[:197] + "..."
    op = f" in {running}" if running else ""
    return f"{job.model}: {place} fails at batch {batch}{op}{line}: {text}; check --input and --target"


def _source_line(error: BaseException) -> str:
    """The innermost line of code that is neither torch's nor the planner's."""
    own = str(Path(__file__).resolve().parent)
    theirs = str(Path(torch.__file__).resolve().parent)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((own, theirs, "<")):
            return f" ({Path(frame.filename).name}:{frame.lineno}: {frame.line})"
    return ""
