"""Run a user's file, and return the value that FILE.py:NAME refers to."""

import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from planner._support.bounded_read import LARGEST_CODE_BYTES, read_text
from planner.capture.cuda.devices.translation import planned_device
from planner.capture.cuda.optimizers.torchao import offload_constructed
from planner.capture.distributed.other_ranks import OtherRankError
from planner.capture.failure_reasons import remedy_for
from planner.capture.models.adapter_types import adapters_like_weights
from planner.capture.models.libraries import quiet, unknown_name
from planner.capture.models.quantized.torchao import prepare_torchao
from planner.capture.models.torchvision.shim import prepare_torchvision
from planner.capture.models.transformers.own_trainer import import_trainers, is_trainer, trainers_constructed
from planner.capture.models.user_code.sibling_modules import folder_importable, forget_modules
from planner.capture.models.user_code.step import needs_arguments
from planner.capture.process_state import first_line_of, preserve_process_state, raise_interrupt
from planner.errors import ModelError, UsageError
from planner.jobs import shown, split_model


def find_in_file(name: str) -> Callable[..., object]:
    """Run FILE.py, and return a constructor of its model NAME, which is a class, a function or a model."""
    model, call = open_file(name, "model")

    def construct(**arguments: Any) -> object:
        if not isinstance(model, nn.Module):
            return call(model, **arguments)
        if arguments:
            raise UsageError(f"{name}: is a model already and takes no --model-arg; remove it")
        return call(lambda: model)

    return construct


def find_step_in_file(name: str) -> Callable[..., object]:
    """Return a constructor of the training step FILE.py:NAME.

    Each call of the constructor runs the file again, and the modules in its folder that it imports. Models
    and optimizers may be globals of these files, and each capture starts with new models and optimizers.
    """

    prepare_torchao(Path(name.rpartition(":")[0]))

    def construct(**arguments: Any) -> object:
        path = _path_of(name, "step")
        code = read_text(path, LARGEST_CODE_BYTES, errors="replace")
        import_trainers(code)
        forget_modules(path)
        with offload_constructed(code):
            with trainers_constructed():  # a file may make its trainer at its top level
                value, call = open_file(name, "step")
            owner, method = _owner_of_method(name, value)
            if owner is not None:
                return getattr(call(owner, **arguments), method)
            if not callable(value) or is_trainer(value):  # an object that the file has made
                if arguments:
                    raise UsageError(f"{name}: is an object already and takes no --model-arg; remove it")
                return call(lambda: value)
            if not needs_arguments(value, arguments):
                with trainers_constructed():
                    return call(value, **arguments)
            call(lambda: None)
            return partial(value, **arguments) if arguments else value

    return construct


def _owner_of_method(name: str, value: object) -> tuple[type | None, str]:
    """Return the class and the method name of a step FILE.py:CLASS.METHOD.

    The class is None if `value` is no method, or is a static method or a class method.
    """
    owner, _, method = name.rpartition(":")[2].rpartition(".")
    scope = getattr(value, "__globals__", {})
    cls = scope.get(owner) if inspect.isfunction(value) else None
    is_method = isinstance(cls, type) and inspect.isfunction(inspect.getattr_static(cls, method, None))
    return (cls if is_method else None), method


def open_file(name: str, what: str) -> tuple[Any, Callable[..., object]]:
    """Run a user's file, and return the value of NAME and a function that calls the file's code.

    `name` is FILE.py:NAME. The returned function takes a callable and its arguments, and applies the changes
    that the file made to the process. `what` names the value's kind in messages. Raises UsageError if the
    file or NAME does not exist, ModelError if the file fails.
    """
    path = _path_of(name, what)
    prepare_torchvision()
    module, change_process = _run_file(path)

    def call(function: Callable[..., object], **arguments: Any) -> object:
        change_process()  # the file may have set a dtype or a path that its code relies on
        with folder_importable(path), adapters_like_weights():  # the file may have imported peft
            return function(**arguments)

    return _value_in(module, path, name, what), call


def open_optimizer(name: str, model: str) -> tuple[Any, Callable[..., object]]:
    """Open an optimizer FILE.py:NAME as `open_file` does, but do not run the model's own file again.

    A second run of the file would define new classes, which differ from the classes of the model.
    """
    what = "optimizer"
    path = _path_of(name, what)
    module = sys.modules.get(_module_name(path))
    if module is None or split_model(model).source != "file" or _path_of(model, "model") != path:
        return open_file(name, what)

    def call(function: Callable[..., object], **arguments: Any) -> object:
        with folder_importable(path), adapters_like_weights():  # the file may have imported peft
            return function(**arguments)

    return _value_in(module, path, name, what), call


def _path_of(name: str, what: str) -> Path:
    file = name.rpartition(":")[0]
    path = Path(os.path.realpath(file))
    if not path.is_file():
        raise UsageError(f"{what} {shown(name)}: there is no file {shown(file)}; check the path")
    return path


def _value_in(module: ModuleType, path: Path, name: str, what: str) -> Any:
    attribute = name.rpartition(":")[2]
    value, owner = module, path.name
    for one in attribute.split("."):
        inner = getattr(value, one, None)
        if inner is None:
            names = [key for key in vars(value) if callable(getattr(value, key)) and not key.startswith("__")]
            raise unknown_name(owner, one, names, what)
        value, owner = inner, f"{path.name}:{one}"
    return value


def _module_name(path: Path) -> str:
    return f"_planner_{path.stem}_{sha256(os.fsencode(path)).hexdigest()[:12]}"


def _run_file(path: Path) -> tuple[ModuleType, Callable[[], None]]:
    """Run a file as a module, and return the module and a function that repeats its changes to the process.

    The process state is restored afterwards. The module's name is unique. The file's folder is importable,
    and its command line has no arguments. Raises ModelError if the file fails.
    """
    prepare_torchao(path)
    name = _module_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ModelError(f"{path.name}: is no Python file; name one that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up there
    handled = sys.exception()
    try:
        with preserve_process_state() as note_changes:
            sys.argv[:] = [str(path)]  # some files parse it at their top level
            with planned_device(), folder_importable(path), quiet():
                spec.loader.exec_module(module)
            return module, note_changes()
    except KeyboardInterrupt:
        raise
    except OtherRankError:
        sys.modules.pop(name, None)
        raise
    except BaseException as error:
        raise_interrupt(error, handled)
        sys.modules.pop(name, None)
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        where = f"{path.name}:{lines[-1]}" if lines else path.name
        problem = f"{where}: importing the file fails: {first_line_of(error)}"
        raise ModelError(f"{problem}; {remedy_for(error, 'mend the file')}") from error
