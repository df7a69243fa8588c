"""Wrap a user's training step (FILE.py:NAME) in a module.

The module holds the models of the step. NAME is a class or a function that returns an object with a method
`step` or returns a function; otherwise NAME is the step itself, whose models and optimizers are globals of
its file. Models and optimizers of a step are found by following its attributes, containers, closures and
globals, so that parameters are recorded with their modules' names.
"""

import ast
import functools
import inspect
import sys
import sysconfig
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor, nn, optim

from planner.capture.cuda.callers import modules_of_users
from planner.errors import ModelError, UsageError
from planner.jobs import kind_text

_STANDARD = sysconfig.get_paths()["stdlib"]
_MOST_VALUES = 20_000  # the search looks into at most this many values
_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType)


class StepModule(nn.Module):
    """A module that runs a user's training step. It holds the step's models and optimizers."""

    words_for_root = "its step"  # this module's name in messages about operators outside of all submodules

    def __init__(self, step: Callable[..., Any], root: object, name: str) -> None:
        """Find the modules, tensors and optimizers that `root` holds.

        `root` is the object whose method is the step, or the step itself if it is a function. Raises
        ModelError if no module, no optimizer and no tensor that requires gradients is found.
        """
        super().__init__()
        self._step = step
        self._name = name
        found = _Holdings()
        found.follow(root, "")
        if not (found.modules or found.optimizers or any(one.requires_grad for one in found.tensors)):
            names = ", ".join(_argument_names(step))
            raise ModelError(
                f"{name}: its step takes {names} and holds no nn.Module or optimizer that can be found; keep "
                "models in attributes, closures or globals of the file: name a function that makes them and "
                "returns `lambda x, y: train_step(model, optimizer, x, y)`"
            )
        self.held_tensors = found.tensors
        # Held weakly, since a step may replace its models and optimizers, which frees them.
        self.__dict__["_modules"] = WeakValueDictionary(found.outermost())
        self.optimizers = WeakValueDictionary({id(one): one for one in found.optimizers})

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> Any:
        """Call the step on a batch as from a data loader, and return its result."""
        return self._step(*self._arguments(args, kwargs, target))

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any) -> list[Any]:
        """Return the arguments with which a script would call the step on a batch.

        A step of one argument gets the whole batch: a tensor, a list of tensors as `default_collate` makes
        it, or a dict if the tensors have names. A step of several arguments gets the tensors in order, or by
        their names. Raises UsageError if there are no tensors, or if they do not match the step's arguments.
        """
        values = [*args, *([] if target is None else [target])]
        names = _argument_names(self._step)
        if not values and not kwargs:
            raise UsageError(
                f"{self._name}: its batch is unknown; give one sample, such as --input 3x224x224"
            )
        if len(names) == 1:
            if kwargs.keys() == {names[0]} and not values:
                return [kwargs[names[0]]]
            if kwargs and values:
                raise UsageError(f"{self._name}: some tensors of its batch have names and others none")
            is_alone = len(values) == 1 and not unpacks_one(self._step, names[0])
            return [kwargs] if kwargs else [values[0] if is_alone else values]
        remaining = iter(values)
        missing = [name for name in names if name not in kwargs]
        if len(missing) != len(values) or len(names) != len(kwargs) + len(missing):
            given = len(values) + len(kwargs)
            raise UsageError(
                f"{self._name}: its step takes {', '.join(names)}; {given} tensors are given by --input and "
                "--target"
            )
        return [kwargs[name] if name in kwargs else next(remaining) for name in names]


def make_step(made: object, name: str) -> nn.Module:
    """Wrap a function, or an object with a method `step`, in a `StepModule`.

    A `StepModule` is returned itself. Raises ModelError for optimizers and other values.
    """
    if isinstance(made, StepModule):
        return made
    step = getattr(made, "step", None)
    if callable(step) and not isinstance(made, optim.Optimizer):
        return StepModule(step, made, name)
    if inspect.isroutine(made) or isinstance(made, functools.partial):
        return StepModule(made, made, name)
    raise ModelError(
        f"{name}: gives {kind_text(made)} without step(batch); return an object with that method, or "
        "the function itself"
    )


def modules_held_by(value: object) -> list[nn.Module]:
    """Return the outermost modules found by a search through an object's attributes, closures and globals."""
    found = _Holdings()
    found.follow(value, "")
    return [*found.outermost().values()]


def needs_arguments(function: object, given: dict[str, Any]) -> bool:
    """Return whether a function requires arguments that are not in `given`.

    A step's batch is such an argument. False for a value that is not a Python function, such as a class.
    """
    if not inspect.isfunction(function):
        return False
    parameters = inspect.signature(function).parameters.values()
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(
        one.default is one.empty and one.kind not in variable and one.name not in given for one in parameters
    )


def unpacks_one(step: Callable[..., Any], name: str) -> bool:
    """Return whether a step's code unpacks an argument into one variable.

    An example is `(images,) = batch`; `name` is the argument. A loader over a `TensorDataset` of one tensor
    yields such batches. False if the source is not available.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(step)))
    except (OSError, TypeError, SyntaxError):  # the function was made at run time, or is no Python function
        return False
    return any(
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Name)
        and node.value.id == name
        and any(isinstance(one, ast.Tuple | ast.List) and len(one.elts) == 1 for one in node.targets)
        for node in ast.walk(tree)
    )


def _argument_names(step: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(step).parameters.values()
    plain = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    needed = [one.name for one in plain if one.default is one.empty]
    return needed or [one.name for one in plain[:1]]


class _Holdings:
    """The modules, tensors and optimizers that a search has found, in order. `follow` searches a value."""

    def __init__(self) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.tensors: list[Tensor] = []
        self.optimizers: list[optim.Optimizer] = []
        self._seen: dict[int, object] = {}  # keeps values alive, so that Python does not reuse their ids
        self._own = {id(vars(module)): module for module in modules_of_users()}

    def outermost(self) -> dict[str, nn.Module]:
        """Return the found modules that are in no other found module, by name."""
        inner = {id(one) for module in self.modules.values() for one in [*module.modules()][1:]}
        return {key: module for key, module in self.modules.items() if id(module) not in inner}

    def follow(self, value: Any, name: str) -> None:
        """Collect the modules, tensors and optimizers in a value.

        `name` is the attribute that holds the value.
        """
        if isinstance(value, _PLAIN) or id(value) in self._seen or len(self._seen) > _MOST_VALUES:
            return
        self._seen[id(value)] = value
        if isinstance(value, nn.Module):
            self._add_module(value, name)
        elif isinstance(value, Tensor):
            self.tensors.append(value)
        elif isinstance(value, optim.Optimizer):
            self.optimizers.append(value)
        for key, inner in self._held_by(value):
            self.follow(inner, key if not name or not key else f"{name}_{key}")

    def _add_module(self, module: nn.Module, name: str) -> None:
        key = free = name or "model"
        number = 2
        while key in self.modules:
            key, number = f"{free}_{number}", number + 1
        self.modules[key] = module

    def _held_by(self, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, dict):
            yield from [(str(key), inner) for key, inner in value.items()]
        elif isinstance(value, list | tuple | set | frozenset):
            yield from [(str(number), inner) for number, inner in enumerate(value)]
        elif isinstance(value, types.MethodType):
            yield "", value.__self__
            yield "", value.__func__
        elif isinstance(value, functools.partial):
            yield "", value.func
            yield "", value.args
            yield "", value.keywords
        elif isinstance(value, types.FunctionType):
            yield from self._held_by_function(value)
        elif isinstance(value, nn.Module):
            own = ("_parameters", "_buffers", "_modules")
            yield from [(key, inner) for key, inner in vars(value).items() if key not in own]
            yield from _methods_of(value)
        elif hasattr(value, "__dict__"):
            is_of_library = _is_of_library(type(value))
            yield from _methods_of(value)
            for key, inner in list(vars(value).items()):
                if (
                    not is_of_library
                    or isinstance(inner, nn.Module | optim.Optimizer)
                    or _is_of_tensors(inner)
                ):
                    yield key, inner

    def _held_by_function(self, function: types.FunctionType) -> Iterator[tuple[str, Any]]:
        """Yield a function's closure variables and globals as (name, value) pairs.

        Only globals that the code names are yielded. Globals are yielded only if the function is in a user's
        file. The first pair is ("", the function that it wraps, or None).
        """
        yield "", getattr(function, "__wrapped__", None)
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for key, cell in cells:
            try:
                yield key, cell.cell_contents
            except ValueError:  # not assigned yet
                continue
        if id(function.__globals__) in self._own:
            for key in _names_in(function.__code__):
                if key in function.__globals__:
                    yield key, function.__globals__[key]


def _methods_of(value: object) -> Iterator[tuple[str, Any]]:
    """Yield the methods that a value's classes define, skipping library classes.

    The items are ("", function), property getters included. They are searched because their code may name
    globals.
    """
    for kind in type(value).__mro__:
        if not _is_of_library(kind):
            for held in vars(kind).values():
                function = getattr(held, "__func__", None) or getattr(held, "fget", None) or held
                if isinstance(function, types.FunctionType):
                    yield "", function


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names_in(inner)


def _is_of_tensors(value: object) -> bool:
    """Return whether a value is a non-empty list or dict of tensors, such as averages of parameters."""
    if isinstance(value, dict):
        return _is_of_tensors(list(value.values()))
    return isinstance(value, list) and bool(value) and all(isinstance(one, Tensor) for one in value)


def _is_of_library(kind: type) -> bool:
    """Return whether a class belongs to the standard library or an installed package.

    A class without a file counts too.
    """
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return not file or file.startswith(_STANDARD) or "site-packages" in file or "dist-packages" in file
