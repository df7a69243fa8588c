"""Rebuild the optimizer of a live module.

The new optimizer is over the parameters of a copy without weights. The optimizer's groups, weight decay and
options such as `amsgrad` decide how many states and temporaries there are, so it is rebuilt with all of them,
not with the defaults of its class.
"""

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn, optim
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX

from planner.capture.loop.named_optimizers import MakeOptimizer, find_optimizer, needs_closure
from planner.capture.loop.optimizers import CONSTRUCTORS
from planner.errors import UsageError
from planner.jobs import Job, Optimizer, OptimizerImpl

# Attributes that a copied optimizer does not get: state, groups, and methods that a scheduler has wrapped.
_OWN = ("step", "zero_grad", "state", "param_groups")
_DECIDE_MEMORY = ("amsgrad", "maximize", "centered", "weight_decay")  # options that an optimizer's name omits
_CHOSEN_BY_TORCH = ("foreach", "fused")  # options that torch chooses by the device if they are None


@dataclass(frozen=True, slots=True)
class LiveOptimizer:
    """An optimizer's class, parameter groups and options, without state. Parameters are given by name."""

    kind: type[optim.Optimizer]
    groups: tuple[tuple[tuple[str, ...], Mapping[str, Any]], ...]  # parameter names and options of each group
    keywords: Mapping[str, Any] = field(default_factory=dict)  # arguments of a class outside of torch
    prepare: Callable[[nn.Module], None] | None = None  # called with the module once the optimizer is made

    def over(self, module: nn.Module) -> optim.Optimizer:
        """Return the optimizer, rebuilt over the parameters of `module`.

        `foreach` is set as torch does on CUDA.
        """
        parameters = _parameters_of(module)
        groups = [
            {**_on_cuda(self.kind, options), "params": [parameters[name] for name in names]}
            for names, options in self.groups
        ]
        chosen = {name: groups[0][name] for name in _CHOSEN_BY_TORCH if name in groups[0]}
        made = self.kind(groups, **chosen, **self.keywords)
        if self.prepare is not None:
            self.prepare(module)
        return made


def _parameters_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return a module's parameters by name. Prefixes of torch's checkpoint wrappers are removed."""
    return {name.replace(_CHECKPOINT_PREFIX, ""): one for name, one in module.named_parameters()}


@dataclass(frozen=True, slots=True)
class CopiedOptimizer:
    """An optimizer of a class outside of torch, to be copied without state. `over` makes the copies."""

    original: optim.Optimizer
    groups: tuple[tuple[tuple[str, ...], Mapping[str, Any]], ...]  # parameter names and options of each group
    overrides: Mapping[str, Any]  # bitsandbytes' settings of single parameters, by parameter name

    @property
    def kind(self) -> type[optim.Optimizer]:
        """Return the optimizer's class."""
        return type(self.original)

    def over(self, module: nn.Module) -> optim.Optimizer:
        """Return a copy of the optimizer over the parameters of `module`. State and hooks are not copied."""
        parameters = _parameters_of(module)
        made = self.kind.__new__(self.kind)
        for name, value in vars(self.original).items():
            if name not in _OWN:
                is_hooks = name.endswith("_hooks")
                vars(made)[name] = OrderedDict() if is_hooks else _copied(value)
        made.state = defaultdict(dict)
        made.param_groups = [
            {
                **{key: _copied(value) for key, value in options.items()},
                "params": [parameters[one] for one in names],
            }
            for names, options in self.groups
        ]
        if self.overrides:
            manager = made.mng  # type: ignore[attr-defined]
            manager.pid2config.update({id(parameters[name]): one for name, one in self.overrides.items()})
        return made


def _copied(value: Any) -> Any:
    """Return a deep copy of a value, or the value itself if it is a class or its class has `get_instance`."""
    is_shared = hasattr(type(value), "get_instance")  # a singleton, such as bitsandbytes' manager
    return value if is_shared or isinstance(value, type) else copy.deepcopy(value)


AnyLiveOptimizer = LiveOptimizer | CopiedOptimizer


def read_optimizer(optimizer: optim.Optimizer, module: nn.Module) -> AnyLiveOptimizer:
    """Return a description of an optimizer of `module`, from which it is rebuilt over copies of the module.

    Parameters are described by their names in the module. Raises UsageError for parameters that are not the
    module's, and for optimizers that need a closure.
    """
    if needs_closure(optimizer):
        raise UsageError(
            f"optimizer {type(optimizer).__name__} calls the loss several times in a step, as often as "
            "values decide, which no plan knows; plan another, or use planner run"
        )
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        foreign = [parameter for parameter in group["params"] if id(parameter) not in names]
        if foreign:
            raise UsageError(
                f"the optimizer has {len(foreign)} parameters that the model has not; make it from "
                "model.parameters(), after the last change to the model"
            )
        known = optimizer.defaults if is_torch_class(type(optimizer)) else group
        options = {name: _plain(group[name]) for name in known if name in group and name != "params"}
        groups.append((tuple(names[id(parameter)] for parameter in group["params"]), options))
    if is_torch_class(type(optimizer)):
        return LiveOptimizer(type(optimizer), tuple(groups))
    return CopiedOptimizer(optimizer, tuple(groups), _overrides(optimizer, module))


def is_torch_class(kind: type) -> bool:
    """Return whether an optimizer class is defined in torch.optim."""
    return kind.__module__.startswith("torch.optim.")


def _overrides(optimizer: optim.Optimizer, module: nn.Module) -> dict[str, Any]:
    """Return bitsandbytes' settings for single parameters, by parameter name, or {} for other libraries.

    The settings are registered for parameters, or for attributes of modules.
    """
    manager = getattr(optimizer, "mng", None)
    if manager is None:
        return {}
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    of_modules = {
        id(getattr(one, attribute)): config for one, attribute, config in manager.module_weight_config_triple
    }
    configs = {**manager.pid2config, **of_modules}
    return {names[key]: config for key, config in configs.items() if key in names}


def settings_of(optimizer: optim.Optimizer) -> optim.Optimizer:
    """Return a plain `torch.optim.Optimizer` with the group options and defaults of an optimizer.

    Parameters, state and the optimizer's own class are left out.
    """
    bare = optim.Optimizer.__new__(optim.Optimizer)
    groups = [{**group, "params": []} for group in optimizer.param_groups]
    bare.__dict__.update(param_groups=groups, defaults=dict(optimizer.defaults), state={})
    return bare


def notes_of_optimizer(optimizer: AnyLiveOptimizer) -> tuple[str, ...]:
    """Return a note on an optimizer's options that change its memory and differ from defaults, or ()."""
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
    return tuple(notes)


def optimizer_maker(model: nn.Module, job: Job) -> MakeOptimizer:
    """Return a function that makes the model's own optimizer, or else the job's."""
    own = getattr(model, "make_own_optimizer", None)
    return (lambda *_: own()) if callable(own) else find_optimizer(job)


def _on_cuda(kind: type[optim.Optimizer], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options, with a `foreach` of None as torch chooses it on CUDA (torch/optim/optimizer.py)."""
    resolved = dict(options)
    if not resolved.get("fused") and resolved.get("foreach") is None and "foreach" in resolved:
        resolved["foreach"] = kind is not optim.Adafactor
    return resolved


def _plain(value: Any) -> Any:
    """Return an option with its tensors replaced by example numbers.

    Memory does not depend on their values.
    """
    if isinstance(value, Tensor):
        return 1e-3
    if isinstance(value, tuple):
        return tuple(0.9 if isinstance(one, Tensor) else one for one in value)
    return value


# ---- kind and implementation as fields of a job

# A class that several short names stand for, such as SGD, is mapped to the first of the names.
_OPTIMIZERS = {make.func: kind for kind, make in reversed(CONSTRUCTORS.items())}


def fields_of_optimizer(optimizer: Any) -> dict[str, Any]:
    """Return the job fields `optimizer` and `optimizer_impl` that describe an optimizer.

    Raises UsageError for `differentiable=True`, which is not planned.
    """
    options = optimizer.param_groups[0]
    kind = name_of_optimizer(type(optimizer), options)
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


def name_of_optimizer(kind: type, options: Any) -> Optimizer | str:
    """Return a job's short name for an optimizer, or else the dotted name of its class."""
    if kind is optim.SGD and options.get("momentum"):
        return Optimizer.NESTEROV if options.get("nesterov") else Optimizer.MOMENTUM
    if kind in _OPTIMIZERS:
        return _OPTIMIZERS[kind]
    module = "torch.optim" if is_torch_class(kind) else kind.__module__
    return f"{module}.{kind.__name__}"
