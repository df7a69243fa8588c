"""Rebuild the optimizer of a module in use over the parameters of a copy without weights.

Its groups, weight decay and options such as `amsgrad` decide how many states and temporaries there are, so
that it is built with all of them, not as the default of its class.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn, optim

from planner.capture.loop.named_optimizers import MakeOptimizer, find_optimizer
from planner.capture.loop.optimizers import CONSTRUCTORS
from planner.errors import UsageError
from planner.jobs import Job, Optimizer, OptimizerImpl

_DECIDE_MEMORY = ("amsgrad", "maximize", "centered", "weight_decay")  # and are no name of an optimizer here
_CHOSEN_BY_TORCH = ("foreach", "fused")  # None stands for what torch takes on the device


@dataclass(frozen=True, slots=True)
class LiveOptimizer:
    """A torch optimizer without its state; parameters go by their names in the module."""

    kind: type[optim.Optimizer]
    groups: tuple[tuple[tuple[str, ...], Mapping[str, Any]], ...]  # names of parameters -> options

    def over(self, module: nn.Module) -> optim.Optimizer:
        """Build the optimizer over a copy of the module, in the implementation that CUDA would have."""
        parameters = dict(module.named_parameters())
        groups = [
            {**_on_cuda(self.kind, options), "params": [parameters[name] for name in names]}
            for names, options in self.groups
        ]
        return self.kind(groups, **{name: groups[0][name] for name in _CHOSEN_BY_TORCH if name in groups[0]})


def read_optimizer(optimizer: optim.Optimizer, module: nn.Module) -> LiveOptimizer:
    """Return the optimizer's class and groups. Raises UsageError for parameters that are not the module's."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        foreign = [parameter for parameter in group["params"] if id(parameter) not in names]
        if foreign:
            raise UsageError(
                f"the optimizer has {len(foreign)} parameters that the model has not; make it from "
                "model.parameters(), after the last change to the model"
            )
        options = {name: _plain(group[name]) for name in optimizer.defaults if name in group}
        groups.append((tuple(names[id(parameter)] for parameter in group["params"]), options))
    return LiveOptimizer(type(optimizer), tuple(groups))


def settings_of(optimizer: optim.Optimizer) -> optim.Optimizer:
    """Return an optimizer with the same learning rates and other numbers, and no parameters."""
    bare = optim.Optimizer.__new__(optim.Optimizer)
    groups = [{**group, "params": []} for group in optimizer.param_groups]
    bare.__dict__.update(param_groups=groups, defaults=dict(optimizer.defaults), state={})
    return bare


def notes_of_optimizer(optimizer: LiveOptimizer) -> tuple[str, ...]:
    """Return notes on options that differ from the class's defaults."""
    parameters = inspect.signature(optimizer.kind).parameters
    defaults = {name: one.default for name, one in parameters.items()}
    changed: dict[str, Any] = {}
    for _, options in optimizer.groups:
        for name in _DECIDE_MEMORY:
            if options.get(name) and options[name] != defaults.get(name):
                changed.setdefault(name, options[name])
    notes = []
    if changed:
        settings = ", ".join(f"{name}={value}" for name, value in changed.items())
        notes.append(f"the optimizer is planned with its own settings: {settings}")
    if any(options.get("capturable") for _, options in optimizer.groups):
        notes.append(
            "the optimizer's capturable=True is not planned: each parameter's step count is on the GPU then, "
            "512 bytes each"
        )
    return tuple(notes)


def optimizer_maker(model: nn.Module, job: Job) -> MakeOptimizer:
    """Return what makes the optimizer that the model brings with it, or else the job's."""
    own = getattr(model, "make_own_optimizer", None)
    return (lambda *_: own()) if callable(own) else find_optimizer(job)


def _on_cuda(kind: type[optim.Optimizer], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with torch's defaults on CUDA (torch/optim/optimizer.py)."""
    resolved = dict(options)
    if "capturable" in resolved:
        resolved["capturable"] = False
    if not resolved.get("fused") and resolved.get("foreach") is None and "foreach" in resolved:
        resolved["foreach"] = kind is not optim.Adafactor
    return resolved


def _plain(value: Any) -> Any:
    """Return a learning rate, or another option that may be a tensor, as a number."""
    if isinstance(value, Tensor):
        return 1e-3
    if isinstance(value, tuple):
        return tuple(0.9 if isinstance(one, Tensor) else one for one in value)
    return value


# ---- kind and implementation as fields of a job

# A class that makes several of a job's optimizers stands for the first of them.
_OPTIMIZERS = {make.func: kind for kind, make in reversed(CONSTRUCTORS.items())}


def fields_of_optimizer(optimizer: Any) -> dict[str, Any]:
    """Return kind and implementation of an optimizer. Raises UsageError for one that is not planned.

    A subclass counts as unknown: its state may differ.
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
        names = ", ".join(one.__name__ for one in reversed(_OPTIMIZERS))
        raise UsageError(f"optimizer {kind.__name__} is not planned; use one of {names}")
    if kind is optim.SGD and options.get("momentum"):
        return Optimizer.NESTEROV if options.get("nesterov") else Optimizer.MOMENTUM
    return _OPTIMIZERS[kind]
