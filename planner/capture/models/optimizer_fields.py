"""Kind and implementation of a torch optimizer in use."""

from typing import Any

from torch import optim

from planner.errors import UsageError
from planner.jobs import Optimizer, OptimizerImpl

_OPTIMIZERS = {
    optim.SGD: Optimizer.SGD,
    optim.Adam: Optimizer.ADAM,
    optim.AdamW: Optimizer.ADAMW,
    optim.RMSprop: Optimizer.RMSPROP,
    optim.Adagrad: Optimizer.ADAGRAD,
    optim.Adafactor: Optimizer.ADAFACTOR,
}


def fields_of_optimizer(optimizer: Any) -> dict[str, Any]:
    """Return kind and implementation of an optimizer. Raises UsageError for one that is not planned.

    A subclass counts as unknown: nobody knows what it keeps besides.
    """
    options = optimizer.param_groups[0]
    kind = kind_of(type(optimizer), options)
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise UsageError(
            "the optimizer's differentiable=True is not planned: it keeps the graph of each step"
        )
    implementation = OptimizerImpl.FOREACH
    if options.get("fused"):
        implementation = OptimizerImpl.FUSED
    elif options.get("foreach") is False or (kind is Optimizer.ADAFACTOR and not options.get("foreach")):
        implementation = OptimizerImpl.FOR_LOOP
    return {"optimizer": kind, "optimizer_impl": implementation}


def kind_of(kind: type, options: Any) -> Optimizer:
    """Return the planner's name of an optimizer's class. Raises UsageError for one that is not planned."""
    if kind not in _OPTIMIZERS:
        known = ", ".join(one.__name__ for one in _OPTIMIZERS)
        raise UsageError(f"optimizer {kind.__name__} is not planned; use one of {known}")
    if kind is optim.SGD and options.get("momentum"):
        return Optimizer.NESTEROV if options.get("nesterov") else Optimizer.MOMENTUM
    return _OPTIMIZERS[kind]
