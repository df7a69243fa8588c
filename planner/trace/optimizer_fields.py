"""Kind and implementation of a torch optimizer in use."""

from typing import Any

from torch import optim

from planner.errors import UsageError
from planner.job import Optimizer, OptimizerImpl

_OPTIMIZERS = {
    optim.Adam: Optimizer.ADAM,
    optim.AdamW: Optimizer.ADAMW,
    optim.RMSprop: Optimizer.RMSPROP,
    optim.Adagrad: Optimizer.ADAGRAD,
    optim.Adafactor: Optimizer.ADAFACTOR,
}


def fields_of_optimizer(optimizer: Any) -> dict[str, Any]:
    """Kind and implementation of an optimizer. Raises UsageError for one that is not planned."""
    options = optimizer.param_groups[0]
    if isinstance(optimizer, optim.SGD):
        plain = Optimizer.NESTEROV if options["nesterov"] else Optimizer.MOMENTUM
        kind = plain if options["momentum"] else Optimizer.SGD
    elif type(optimizer) in _OPTIMIZERS:
        kind = _OPTIMIZERS[type(optimizer)]
    else:
        known = ", ".join(["SGD", *(one.__name__ for one in _OPTIMIZERS)])
        raise UsageError(f"optimizer {type(optimizer).__name__} is not planned; use one of {known}")
    implementation = OptimizerImpl.FOREACH
    if options.get("fused"):
        implementation = OptimizerImpl.FUSED
    elif options.get("foreach") is False:
        implementation = OptimizerImpl.FOR_LOOP
    return {"optimizer": kind, "optimizer_impl": implementation}
