"""Set the categories of recorded blocks that hold gradients and optimizer state."""

from collections.abc import Iterable

from torch import nn

from planner.capture.loop.named_optimizers import AnyOptimizer, state_tensors
from planner.capture.recorder.recorder import Recorder
from planner.program import Category


def set_categories(recorder: Recorder, parameters: Iterable[nn.Parameter], optimizer: AnyOptimizer) -> None:
    """Set the category `GRADIENT` or `OPTIMIZER` for blocks that now hold gradients or optimizer state."""
    set_gradients(recorder, parameters)
    for tensor in state_tensors(optimizer):
        recorder.set_category(tensor, Category.OPTIMIZER)


def set_gradients(recorder: Recorder, parameters: Iterable[nn.Parameter]) -> None:
    """Set the category `GRADIENT` for blocks that now hold gradients of `parameters`."""
    for parameter in parameters:
        if parameter.grad is not None:
            recorder.set_category(parameter.grad, Category.GRADIENT)
