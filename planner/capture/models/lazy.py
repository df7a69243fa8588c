"""Initialise lazy modules.

Their parameters get shapes from the first batch.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from planner.capture.cuda.devices.translation import devices_shown
from planner.capture.failure_reasons import reads_values, remedy_for, sentence_of, source_line
from planner.capture.loop.batches import empty_batch
from planner.capture.models.user_code.step import StepModule
from planner.capture.process_state import foreign_errors
from planner.capture.recorder.recorder import Run
from planner.capture.values.interpreter import DataDependentError
from planner.errors import ModelError
from planner.jobs import Job
from planner.program import Phase


class _Running(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that runs operators on meta tensors as in a capture. Nothing is recorded."""

    def __init__(self, run: Run) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(one, Tensor) and is_lazy(one) for one in args):  # its shape is being set
            return func(*args, **(kwargs or {}))
        return self._run(func, args, kwargs or {}, Phase.FORWARD)


def initialise_lazy_modules(model: nn.Module, job: Job, batch: int, run: Run) -> None:
    """Give the parameters of lazy modules their shapes by a call of the model.

    Models without lazy modules are not called, nor is a user's step, whose first call gives the shapes.
    Raises ModelError if the call fails.
    """
    if isinstance(model, StepModule) or not any(
        is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())
    ):
        return
    args, kwargs, _ = empty_batch(job, batch, "meta")
    training = model.training
    model.eval()

    def explain(error: BaseException) -> ModelError:
        if reads_values(error):
            place = f"the call that gives lazy modules their shapes{source_line(error)}"
            return DataDependentError(job.model.name, place)
        problem = (
            f"{job.model.name}: initializing its lazy modules fails{source_line(error)}: {sentence_of(error)}"
        )
        return ModelError(f"{problem}; {remedy_for(error, running='')}")

    try:
        with foreign_errors(explain), devices_shown(), torch.no_grad(), _Running(run):
            model(*args, **kwargs)
    finally:
        model.train(training)
