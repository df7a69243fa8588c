"""Make the optimizer that a job names.

The name is a short name, a class of a library, or a user's FILE.py:NAME. A class is called with the trained
parameters, as a script calls it on CUDA. A function of a file may take the model instead, and may return
several optimizers, which the loop steps in turn.
"""

import importlib
import inspect
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn, optim
from torch.optim.lr_scheduler import LRScheduler

from planner.capture.loop.optimizers import build_optimizer
from planner.capture.models.libraries import unknown_name
from planner.capture.models.user_code.file import open_optimizer
from planner.capture.process_state import first_line_of, foreign_errors
from planner.errors import ModelError, PlannerError, UsageError
from planner.jobs import Job, Mode, Optimizer, OptimizerImpl, is_optimizer_file, kind_text

_MODEL_NAMES = ("model", "module", "net", "network")  # of a function's first argument, if it is the model
_DISTRIBUTIONS = {"lion_pytorch": "lion-pytorch"}  # packages that `pip install` knows by another name
_SEVERAL = "name a function of several optimizers, FILE.py:NAME"


class OptimizerList:
    """Several optimizers that act as one optimizer. A loop steps them in turn."""

    def __init__(self, members: Iterable[optim.Optimizer]) -> None:
        self.members = tuple(members)

    @property
    def state(self) -> Mapping[Any, Any]:
        """Return the states of all members, merged into one dict."""
        return dict(chain.from_iterable(member.state.items() for member in self.members))

    def step(self) -> None:
        """Step each member."""
        for member in self.members:
            member.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of each member's parameters."""
        for member in self.members:
            member.zero_grad(set_to_none=set_to_none)


AnyOptimizer = optim.Optimizer | OptimizerList
MakeOptimizer = Callable[[nn.Module, Iterable[nn.Parameter]], AnyOptimizer]
_Make = Callable[[Job, nn.Module, list[nn.Parameter], dict[str, Any]], Any]


def members_of(optimizer: AnyOptimizer) -> tuple[optim.Optimizer, ...]:
    """Return the members of an optimizer list, or a tuple of the optimizer alone."""
    return optimizer.members if isinstance(optimizer, OptimizerList) else (optimizer,)


def build_named(job: Job, model: nn.Module, parameters: Iterable[nn.Parameter]) -> AnyOptimizer:
    """Return the job's optimizer over the parameters that require gradients.

    The result is an `OptimizerList` if the job has several optimizers. Raises UsageError or ModelError if an
    optimizer cannot be found or made, or if a step needs a closure.
    """
    return find_optimizer(job)(model, parameters)


def find_optimizer(job: Job) -> MakeOptimizer:
    """Return a function that makes the job's optimizer from a model and its parameters.

    Raises UsageError or ModelError if the optimizer cannot be found.
    """
    arguments = dict(job.loop.optimizer_args)
    make: _Make = _make_by_short_name
    if is_optimizer_file(job.loop.optimizer):
        make = _of_file(job)
    elif not isinstance(job.loop.optimizer, Optimizer):
        make = _of_class(load_optimizer(job.loop.optimizer))

    def make_checked(model: nn.Module, parameters: Iterable[nn.Parameter]) -> AnyOptimizer:
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        with foreign_errors(partial(_explain, job)):
            return _checked(make(job, model, trained, arguments), job)

    return make_checked


def _make_by_short_name(
    job: Job, model: nn.Module, trained: list[nn.Parameter], arguments: dict[str, Any]
) -> Any:
    assert isinstance(job.loop.optimizer, Optimizer)
    return build_optimizer(job.loop.optimizer, job.loop.optimizer_impl, trained, arguments)


def prepare_optimizer(job: Job) -> None:
    """Import the library of a job's optimizer before a capture, if the job trains with a library's optimizer.

    A capture replaces names that the library would bind. Errors are ignored: they are raised when the
    optimizer is made, if the model does not bring its own.
    """
    is_named = not isinstance(job.loop.optimizer, Optimizer) and not is_optimizer_file(job.loop.optimizer)
    if job.loop.mode is Mode.TRAIN and is_named:
        with suppress(PlannerError):
            load_optimizer(str(job.loop.optimizer))


def load_optimizer(name: str) -> Callable[..., Any]:
    """Return the optimizer class or function with a dotted name.

    Raises UsageError or ModelError if the name cannot be imported, or is a class that is no optimizer.
    """
    module, _, attribute = name.rpartition(".")
    package = name.partition(".")[0]
    try:
        with _quiet():
            value = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        if error.name == package:
            distribution = _DISTRIBUTIONS.get(package, package)
            raise UsageError(
                f"--optimizer {name}: {package} is not installed; pip install {distribution}"
            ) from error
        raise UsageError(f"--optimizer {name}: there is no module {error.name}; check the name") from error
    except Exception as error:
        raise ModelError(
            f"--optimizer {name}: {package} does not import: {first_line_of(error)}; mend the installation"
        ) from error
    if value is None:
        names = [key for key, one in vars(importlib.import_module(module)).items() if is_optimizer_class(one)]
        raise unknown_name(module, attribute, names, "optimizer")
    if isinstance(value, type) and not is_optimizer_class(value):
        raise UsageError(f"--optimizer {name}: is no subclass of torch.optim.Optimizer; name one")
    return value  # type: ignore[no-any-return]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings, and logs below the level ERROR, inside the context.

    Some libraries warn about a missing GPU.
    """
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def is_optimizer_class(value: object) -> bool:
    """Return whether a value is a subclass of torch's Optimizer."""
    return isinstance(value, type) and issubclass(value, optim.Optimizer)


def _of_class(kind: Callable[..., Any]) -> _Make:
    def make(job: Job, model: nn.Module, trained: list[nn.Parameter], arguments: dict[str, Any]) -> Any:
        return _call(kind, trained, job, arguments)

    return make


def _of_file(job: Job) -> _Make:
    value, call_in_file = open_optimizer(str(job.loop.optimizer), job.model.origin)
    if not callable(value):
        raise UsageError(
            f"--optimizer {job.loop.optimizer}: is {kind_text(value)}; name a class or a function of "
            "the parameters or the model"
        )

    def make(job: Job, model: nn.Module, trained: list[nn.Parameter], arguments: dict[str, Any]) -> Any:
        if is_optimizer_class(value):
            return call_in_file(lambda: _call(value, trained, job, arguments))
        if job.loop.optimizer_impl is not OptimizerImpl.FOREACH:
            raise UsageError(
                f"--optimizer-impl {job.loop.optimizer_impl}: {job.loop.optimizer} chooses by itself; remove "
                "it"
            )
        given = model if _takes_model(value) else trained
        return call_in_file(lambda: value(given, **arguments))

    return make


def _takes_model(function: Callable[..., Any]) -> bool:
    """Return whether a function's first parameter is the model.

    The parameter's name or annotation decides.
    """
    first = next(iter(inspect.signature(function).parameters.values()), None)
    if first is None:
        return False
    annotation = first.annotation
    is_module = isinstance(annotation, type) and issubclass(annotation, nn.Module)
    return first.name in _MODEL_NAMES or is_module or str(annotation) in ("nn.Module", "torch.nn.Module")


def _call(kind: Callable[..., Any], trained: list[nn.Parameter], job: Job, arguments: dict[str, Any]) -> Any:
    """Construct an optimizer, with `fused=True` or `foreach=False` if the job chooses this implementation.

    A required learning rate defaults to 1e-3. Raises UsageError if the optimizer does not take the choice.
    """
    parameters = inspect.signature(kind).parameters
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    options = {"lr": 1e-3} if "lr" in parameters and parameters["lr"].default is inspect._empty else {}
    if (
        job.loop.optimizer_impl is not OptimizerImpl.FOREACH
    ):  # the default is the choice of its author on CUDA
        name = "fused" if job.loop.optimizer_impl is OptimizerImpl.FUSED else "foreach"
        if name not in parameters and not takes_any:
            raise UsageError(
                f"--optimizer-impl {job.loop.optimizer_impl}: {job.loop.optimizer} has no such choice; "
                "remove it"
            )
        options[name] = job.loop.optimizer_impl is OptimizerImpl.FUSED
    return kind(trained, **{**options, **arguments})


def _explain(job: Job, error: BaseException) -> UsageError:
    """Return a UsageError that explains why the job's optimizer cannot be made."""
    text = first_line_of(error)[:200]
    remedy = _SEVERAL if "2D" in text else "check --optimizer-arg"
    return UsageError(f"--optimizer {job.loop.optimizer}: {text}; {remedy}")


def _checked(made: Any, job: Job) -> AnyOptimizer:
    """Return the optimizers in `made` as one optimizer.

    `made` is the result of the job's optimizer class or function. The returned object is an `OptimizerList`
    if `made` holds several optimizers. Raises UsageError if `made` holds no optimizer, or if a step needs a
    closure.
    """
    found = tuple(_optimizers_in(made, job))
    if not found:
        raise UsageError(
            f"--optimizer {job.loop.optimizer}: gives {kind_text(made)}; return an optimizer or several"
        )
    for one in found:
        if needs_closure(one):
            raise UsageError(
                f"--optimizer {job.loop.optimizer}: {type(one).__name__} calls the loss several times in a "
                "step, as often as values decide, which no plan knows; plan another, or use planner run"
            )
    return found[0] if len(found) == 1 else OptimizerList(found)


def _optimizers_in(made: Any, job: Job) -> Iterator[optim.Optimizer]:
    """Yield the optimizers in a result of user code.

    Lists, tuples and mappings are searched at any depth. Learning-rate schedulers, strings, numbers and None
    are skipped. Raises UsageError for any other object.
    """
    if isinstance(made, optim.Optimizer):
        yield made
    elif isinstance(made, Mapping):
        yield from _optimizers_in(list(made.values()), job)
    elif isinstance(made, list | tuple):
        for one in made:
            yield from _optimizers_in(one, job)
    elif not isinstance(made, LRScheduler | str | int | float | None):
        raise UsageError(
            f"--optimizer {job.loop.optimizer}: gives {kind_text(made)}, which is no "
            "torch.optim.Optimizer; return an optimizer or several"
        )


def needs_closure(optimizer: optim.Optimizer) -> bool:
    """Return whether an optimizer's step requires a closure."""
    closure = inspect.signature(inspect.unwrap(type(optimizer).step)).parameters.get("closure")
    return closure is not None and closure.default is inspect._empty


def state_tensors(optimizer: AnyOptimizer) -> Iterator[torch.Tensor]:
    """Yield the tensors of an optimizer's state.

    Lists, mappings and tensor subclasses are searched at any depth.
    """
    for value in optimizer.state.values():
        yield from _tensors_in(value)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for one in value:
            yield from _tensors_in(one)
    elif hasattr(value, "__tensor_flatten__"):
        for name in value.__tensor_flatten__()[0]:
            yield from _tensors_in(getattr(value, name))
    elif isinstance(value, torch.Tensor):
        yield value
