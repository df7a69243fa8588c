"""Optimizers with the defaults that they have on CUDA."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn, optim

from planner.errors import UsageError
from planner.job import Optimizer, OptimizerImpl

_CONSTRUCTORS: dict[Optimizer, Callable[..., optim.Optimizer]] = {
    Optimizer.SGD: partial(optim.SGD, lr=1e-3),
    Optimizer.MOMENTUM: partial(optim.SGD, lr=1e-3, momentum=0.9),
    Optimizer.NESTEROV: partial(optim.SGD, lr=1e-3, momentum=0.9, nesterov=True),
    Optimizer.ADAM: partial(optim.Adam, lr=1e-3),
    Optimizer.ADAMW: partial(optim.AdamW, lr=1e-3),
    Optimizer.RMSPROP: partial(optim.RMSprop, lr=1e-3),
    Optimizer.ADAGRAD: partial(optim.Adagrad, lr=1e-3),
    Optimizer.ADAFACTOR: partial(optim.Adafactor, lr=1e-3),
}
_FUSED = {
    Optimizer.SGD,
    Optimizer.MOMENTUM,
    Optimizer.NESTEROV,
    Optimizer.ADAM,
    Optimizer.ADAMW,
    Optimizer.ADAGRAD,
}


def build_optimizer(
    kind: Optimizer, impl: OptimizerImpl, parameters: Iterable[nn.Parameter]
) -> optim.Optimizer:
    """The optimizer over these parameters, in this implementation.

    On CUDA torch chooses `foreach` unless told otherwise; on meta it would choose the loop, so it is always
    told. Raises UsageError where torch has no fused implementation of the optimizer.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    options: dict[str, Any] = {"foreach": impl is OptimizerImpl.FOREACH}
    if impl is OptimizerImpl.FUSED:
        if kind not in _FUSED:
            names = ", ".join(sorted(_FUSED))
            raise UsageError(
                f"--optimizer-impl fused: torch has no fused {kind}; choose foreach, or one of {names}"
            )
        options = {"fused": True}
    return _CONSTRUCTORS[kind](trained, **options)
