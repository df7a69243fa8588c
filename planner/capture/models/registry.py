"""From a job to its model: one small function for each source of models."""

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from planner.capture.cuda.devices import planned_device
from planner.capture.failure_reasons import remedy_for
from planner.capture.models import timm as timm_inputs
from planner.capture.models.meta_init import construct_on_meta
from planner.capture.models.torchvision.shim import prepare_torchvision
from planner.capture.models.torchvision.weights import without_reading_weights
from planner.capture.models.transformers import build as hf
from planner.capture.models.transformers.inputs import complete_inputs
from planner.capture.process_state import StateDiff, message_of, preserve_process_state
from planner.errors import ModelError, PlannerError, UsageError
from planner.jobs import Job, nearest, shown, split_model

Constructor = Callable[..., object]


def build_model(job: Job) -> nn.Module:
    """The job's model in the state its constructor leaves it, its parameters and buffers on the meta device.

    Raises `UsageError` for a name that the source does not know, `ModelError` where building it fails.
    """
    return construct_model(job, find_constructor(job))


def find_constructor(job: Job) -> Constructor:
    """What makes the job's model; importing the library that it comes from is most of the work."""
    source, name = split_model(job.source or job.model)
    if source not in FINDERS:
        raise UsageError(f"model {shown(job.model)}: no source is named; write SOURCE:NAME or FILE.py:NAME")
    return FINDERS[source](name)


def construct_model(job: Job, constructor: Constructor) -> nn.Module:
    """The model that the constructor makes from the job's arguments, on meta. Raises `ModelError`."""
    arguments = {key: _thaw(value) for key, value in job.model_args}
    try:
        model = construct_on_meta(lambda: constructor(**arguments))
    except (PlannerError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a model may raise anything
        problem = f"{job.model}: its constructor fails: {_first_line(error)}"
        remedy = remedy_for(error, "", "check --model-arg, or see the traceback with --debug")
        raise ModelError(f"{problem}; {remedy}") from error
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise ModelError(f"{job.model}: gives a {kind}, not an nn.Module; name a callable that returns one")
    return model


def find_in_torchvision(name: str) -> Constructor:
    """`resnet50`, any name that torchvision lists, or `segmentation.fcn_resnet50` with the module's name."""
    models = _import_library("torchvision.models", extra="")
    group, _, plain = name.rpartition(".")
    within = getattr(models, group, None)
    known = models.list_models(module=within) if within else []
    if plain not in (known if group else models.list_models()):
        raise _unknown("torchvision", name, models.list_models())
    return without_reading_weights(models.get_model_builder(plain))


def find_in_timm(name: str) -> Constructor:
    """Any name that timm lists, with or without the tag of its weights."""
    timm = _import_timm(name)
    return partial(timm.create_model, name, pretrained=False)


def _import_timm(name: str) -> ModuleType:
    """timm, if it has a model of this name."""
    timm = _import_library("timm", extra="timm")
    if not timm.is_model(name):
        raise _unknown("timm", name, timm.list_models())
    return timm


def find_in_hf(name: str) -> Constructor:
    """A model type or class of transformers, or a folder with config.json; see
    `planner.capture.models.transformers`.
    """
    return partial(hf.build, import_transformers(), name)


def import_transformers() -> ModuleType:
    """transformers, which imports most of itself only when it is used."""
    return _import_library("transformers", extra="hf")


def complete_by_library(job: Job) -> Job:
    """The job with the inputs that only the model's library knows; other sources' jobs as they are.

    Raises UsageError for inputs that the model does not take, ModelError where the library is missing.
    """
    source, name = split_model(job.source or job.model)
    arguments = {key: _thaw(value) for key, value in job.model_args}
    if source == "timm":
        timm = _import_timm(name)
        return timm_inputs.complete_inputs(job, timm.get_pretrained_cfg(name), arguments)
    if source != hf.SOURCE:
        return job
    return complete_inputs(job, hf.choose_class(import_transformers(), name, arguments))


def find_in_monai(name: str) -> Constructor:
    """A network of monai.networks.nets."""
    return _find_in_namespace("monai", name, _import_library("monai.networks.nets", extra="monai"))


def find_in_smp(name: str) -> Constructor:
    """An architecture of segmentation_models_pytorch, its encoder without weights."""
    return _find_in_namespace("smp", name, _import_library("segmentation_models_pytorch", extra="smp"))


def find_in_zoo(name: str) -> Constructor:
    """A model of the seed documents."""
    return _find_in_namespace("zoo", name, importlib.import_module("planner.capture.models.zoo"))


def find_in_file(name: str) -> Constructor:
    """FILE.py:NAME, where NAME is a class, a function that returns a model, or a model."""
    found, call = open_file(name, "model")

    def construct(**arguments: Any) -> object:
        if isinstance(found, nn.Module):
            if arguments:
                raise UsageError(f"{name}: is a model already and takes no --model-arg; leave it away")
            return call(lambda: found)
        return call(found, **arguments)

    return construct


def open_file(name: str, what: str) -> tuple[Any, Callable[..., object]]:
    """Run the file of FILE.py:NAME; gives what NAME is there, and how to call the file's code.

    `what` it should be is said where it is missing. Raises UsageError or ModelError.
    """
    file, _, attribute = name.rpartition(":")
    path = Path(file).resolve()
    if not path.is_file():
        raise UsageError(f"{what} {shown(name)}: there is no file {shown(file)}; check the path")
    prepare_torchvision()
    module, changes = _run_file(path)
    found = getattr(module, attribute, None)
    if found is None:
        known = [key for key, value in vars(module).items() if callable(value)]
        raise _unknown(path.name, attribute, known, what)

    def call(function: Callable[..., object], **arguments: Any) -> object:
        changes.apply()  # the file may have set a dtype or a path that its code counts on
        with _importing_beside(path):
            return function(**arguments)

    return found, call


FINDERS: Mapping[str, Callable[[str], Constructor]] = {
    "torchvision": find_in_torchvision,
    "timm": find_in_timm,
    "hf": find_in_hf,
    "monai": find_in_monai,
    "smp": find_in_smp,
    "zoo": find_in_zoo,
    "file": find_in_file,
}


def _import_library(module: str, extra: str) -> ModuleType:
    """Import a library of models; `extra` is the extra of our own distribution that brings it."""
    library = module.partition(".")[0]
    prepare_torchvision()  # each of these libraries imports torchvision
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        remedy = f"gpu-batch-planner[{extra}]" if extra else library
        if error.name == library:
            raise ModelError(f"{library} is not installed; pip install '{remedy}'") from error
        raise ModelError(f"{library} lacks {error.name}; pip install '{remedy}'") from error
    except Exception as error:
        raise ModelError(f"{library} does not import: {_first_line(error)}; mend the installation") from error


def _find_in_namespace(source: str, name: str, namespace: ModuleType) -> Constructor:
    known = {
        key: value
        for key, value in vars(namespace).items()
        if not key.startswith("_")
        and (inspect.isfunction(value) or (isinstance(value, type) and issubclass(value, nn.Module)))
    }
    if name not in known:
        raise _unknown(source, name, list(known))
    return _without_downloads(known[name])


def _without_downloads(constructor: Callable[..., Any]) -> Constructor:
    """Bind to None what smp calls the weights to download; a caller's choice still counts."""
    arguments = inspect.signature(constructor).parameters
    return partial(constructor, **dict.fromkeys(arguments.keys() & {"encoder_weights"}))


def _run_file(path: Path) -> tuple[ModuleType, StateDiff]:
    """Import a file under a module name of its own, with its folder importable as if it were run.

    What it changes in the process is put back, and told.
    """
    name = f"_planner_{path.stem}_{sha256(str(path).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ModelError(f"{path.name}: is no Python file; name one that ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up there
    try:
        with preserve_process_state() as changes:
            with planned_device(), _importing_beside(path):
                spec.loader.exec_module(module)
            return module, changes()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        sys.modules.pop(name, None)
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        where = f"{path.name}:{lines[-1]}" if lines else path.name
        problem = f"{where}: importing the file fails: {_first_line(error)}"
        raise ModelError(f"{problem}; {remedy_for(error, '', 'mend the file')}") from error


@contextmanager
def _importing_beside(path: Path) -> Iterator[None]:
    folder = str(path.parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        with suppress(ValueError):  # the file may have changed the path itself
            sys.path.remove(folder)


def _unknown(source: str, name: str, known: list[str], what: str = "model") -> UsageError:
    near = nearest(name, known)
    told = f"the nearest: {near}" if near else f"it has {', '.join(known[:8])}" + " ..." * (len(known) > 8)
    return UsageError(f"{source} has no {what} {shown(name)}; {told}")


def _thaw(value: Any) -> Any:
    """Constructors expect the lists that users write; a `Job` holds them as tuples."""
    return [_thaw(item) for item in value] if isinstance(value, tuple) else value


def _first_line(error: BaseException) -> str:
    lines = message_of(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
