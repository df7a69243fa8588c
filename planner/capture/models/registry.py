"""Find and build the model of a job.

Each source of models has its own finder.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

from torch import nn

from planner.capture.failure_reasons import remedy_for
from planner.capture.models.diffusers import build as diffusion
from planner.capture.models.diffusers.inputs import complete_diffusers
from planner.capture.models.libraries import find_in_namespace, import_library
from planner.capture.models.lightning_module import (
    is_lightning_module,
    train_by_lightning,
    uses_lightning,
)
from planner.capture.models.live.kept import LiveConstructor, live_state
from planner.capture.models.meta_init import construct_on_meta
from planner.capture.models.nnunet.build import SOURCE as NNUNET, complete_nnunet, find_nnunet
from planner.capture.models.offline import calling_libraries, check_fetching
from planner.capture.models.timm import complete_timm, find_timm
from planner.capture.models.torchvision.find import find_torchvision
from planner.capture.models.transformers import build as hf
from planner.capture.models.transformers.inputs import complete_inputs
from planner.capture.models.transformers.own_trainer import TrainerModule, is_trainer
from planner.capture.models.user_code.file import find_in_file, find_step_in_file
from planner.capture.models.user_code.step import make_step, needs_arguments
from planner.capture.process_state import first_line_of, foreign_errors, message_of
from planner.errors import ModelError, UsageError
from planner.jobs import Job, Mode, check_evaluated, kind_text, parse_tensor_spec, shown, split_model

Constructor = Callable[..., object]


def build_model(job: Job) -> nn.Module:
    """Return the job's model on the meta device, as its constructor makes it.

    Raises `UsageError` for a name that the source does not know, `ModelError` if building the model fails.
    """
    return construct_model(job, find_constructor(job))


def find_constructor(job: Job) -> Constructor:
    """Return the constructor of the job's model, or of a file's training step in mode `step`.

    Importing the model's library takes most of the time. Raises UsageError for an unknown source or name.
    """
    source, name = split_model(job.model.origin)
    if source not in FINDERS:
        raise UsageError(
            f"model {shown(job.model.name)}: no source is named; write SOURCE:NAME or FILE.py:NAME"
        )
    if source == "file" and job.loop.mode is Mode.STEP:
        return find_step_in_file(name)
    with calling_libraries(job):
        return FINDERS[source](name)


def construct_model(
    job: Job, constructor: Constructor, run: Callable[[Callable[[], object]], object] | None = None
) -> nn.Module:
    """Return the model that a constructor makes with the job's arguments.

    `run` calls the constructor; by default it is `construct_on_meta`. In mode `step` the result is a module
    that holds the models of the user's training step. Raises ModelError if the constructor fails or returns
    no module.
    """
    arguments = {key: _as_lists(value) for key, value in job.model.args}
    check_fetching(job, arguments)

    def construct() -> object:
        if uses_lightning(job):
            return train_by_lightning(constructor(**arguments), job)
        if job.loop.mode is not Mode.STEP:
            return constructor(**arguments)
        made = constructor if needs_arguments(constructor, arguments) else constructor(**arguments)
        if is_trainer(made):
            return TrainerModule(made, job)
        return train_by_lightning(made, job) if is_lightning_module(made) else make_step(made, job.model.name)

    def explain(error: BaseException) -> ModelError:
        problem = f"{job.model.name}: its constructor fails: {first_line_of(error)}"
        otherwise = "check --model-arg, or see the traceback with --debug"
        if isinstance(error, TypeError) and "required" in str(error):
            otherwise = "give it by --model-arg, or name a function without arguments that makes the object"
        return ModelError(f"{problem}; {remedy_for(error, otherwise)}")

    live = live_state()
    if isinstance(constructor, LiveConstructor):
        live.note(constructor.holders())
        constructor = constructor.function
    with foreign_errors(explain), calling_libraries(job):
        model = (run or construct_on_meta)(construct)
    if not isinstance(model, nn.Module):
        kind = kind_text(model)
        problem = f"{job.model.name}: gives {kind}, not an nn.Module; name a callable that returns one"
        is_step = callable(getattr(model, "step", None)) or inspect.isroutine(model)
        raise ModelError(f"{problem}, or add --mode step for its training step" if is_step else problem)
    live.note_planned(model)
    return model


def complete_by_library(job: Job) -> Job:
    """Return the job with the inputs that the model's library implies.

    Inputs for training and for evaluation are completed. Jobs of other sources are unchanged. Raises
    UsageError for inputs that the model does not take, ModelError if the library is missing or refuses the
    model's configuration.
    """
    source, name = split_model(job.model.origin)
    arguments = {key: _as_lists(value) for key, value in job.model.args}
    check_fetching(job, arguments)
    with calling_libraries(job):
        completed = _completed(job, source, name, arguments)
        if not job.loop.eval_input:
            return completed
        given = tuple(map(parse_tensor_spec, job.loop.eval_input))
        evaluated = _completed(job.replace(inputs=given, eval_input=()), source, name, arguments)
    completed = completed.replace(eval_input=tuple(map(str, evaluated.samples.inputs)))
    check_evaluated(completed)
    return completed


def _completed(job: Job, source: str, name: str, arguments: dict[str, Any]) -> Job:
    def explain(
        error: BaseException,
    ) -> ModelError:  # an argument or a value of config.json, whatever is raised
        reason = " ".join(message_of(error).split())[:200] or type(error).__name__
        problem = f"{job.model.name}: its library refuses its configuration: {reason}"
        return ModelError(f"{problem}; check --model-arg, or see the traceback with --debug")

    with foreign_errors(explain):
        if source == "timm":
            return complete_timm(job, name, arguments)
        if source == diffusion.SOURCE:
            return complete_diffusers(job, name, arguments)
        if source == NNUNET:
            return complete_nnunet(job, name, arguments)
        if source == hf.SOURCE:
            return complete_inputs(job, hf.choose_class(import_transformers(), name, arguments))
    return job


def import_transformers() -> ModuleType:
    """Import and return transformers. It imports most of its modules only when they are used."""
    return import_library("transformers", extra="hf")


def find_hf(name: str) -> Constructor:
    """Return the constructor of a transformers model.

    `name` is a model type, a class, or a folder with config.json.
    """
    return partial(hf.build, import_transformers(), name)


def find_diffusers(name: str) -> Constructor:
    """Return the constructor of a diffusers model. `name` is a class, or a folder with config.json."""
    import_library("diffusers.models", extra=diffusion.SOURCE)
    return partial(diffusion.build, name)


def find_in_library(source: str, module: str, name: str) -> Constructor:
    """Return the constructor `name` in a module of a library.

    `source` is also the extra that installs the library.
    """
    return find_in_namespace(source, name, import_library(module, extra=source))


def find_zoo(name: str) -> Constructor:
    """Return the constructor of a model that planner/capture/models/zoo.py defines.

    The models are those of published memory measurements that are in no library.
    """
    return find_in_namespace("zoo", name, importlib.import_module("planner.capture.models.zoo"))


FINDERS: Mapping[str, Callable[[str], Constructor]] = {
    "torchvision": find_torchvision,
    "timm": find_timm,
    "hf": find_hf,
    "diffusers": find_diffusers,
    "nnunet": find_nnunet,
    "monai": partial(find_in_library, "monai", "monai.networks.nets"),
    "smp": partial(find_in_library, "smp", "segmentation_models_pytorch"),
    "zoo": find_zoo,
    "file": find_in_file,
}


def _as_lists(value: Any) -> Any:
    """Return a tuple as a list, with inner tuples as lists too, or any other value unchanged.

    A `Job` holds tuples, but constructors expect lists.
    """
    return [_as_lists(item) for item in value] if isinstance(value, tuple) else value
