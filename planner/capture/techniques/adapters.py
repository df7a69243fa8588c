"""Add the adapters of a peft method to a model.

The adapters are trained, all other weights are frozen. The model has the job's precision, as
`from_pretrained` returns it; with weights of half precision, peft makes adapters in float32
(`autocast_adapter_dtype`).
"""

import inspect
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from planner.capture.models.libraries import import_library, quiet
from planner.capture.models.meta_init import construct_on_meta
from planner.capture.process_state import first_line_of, foreign_errors
from planner.capture.techniques.technique import BuiltModel, Technique
from planner.errors import ModelError, UsageError
from planner.jobs import Job, nearest, shown

# Variants of methods by their own names: the method, and the options that select the variant.
_VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "dora": ("lora", {"use_dora": True}),
    "rslora": ("lora", {"use_rslora": True}),
}
_HEADS = {  # parts of the names of transformers' classes -> peft's task types
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}
_PLACES = (
    "target_modules",
    "modules_to_save",
    "exclude_modules",
    "layers_to_transform",
    "feedforward_modules",
)
Run = Callable[[Callable[[], object]], object]
_OWN = ("autocast_adapter_dtype",)  # keywords of `get_peft_model`, not of the configuration


def attach_adapters(model: nn.Module, job: Job, run: Run = construct_on_meta) -> nn.Module:
    """Return the model with adapters of the job's peft method, or the model itself without a method.

    `run` is called with the function that makes the adapters. Raises UsageError for a method or value that
    peft does not know, ModelError if peft refuses the model.
    """
    if not job.model.peft:
        return model
    with quiet():  # it imports bitsandbytes, which advises on its own installation
        peft = import_library("peft", extra="peft")
    given = dict(job.model.peft_arg)
    own = {name: given.pop(name) for name in _OWN if name in given}

    def explain(error: BaseException) -> ModelError:  # peft checks a configuration when applying it
        problem = f"{job.model.name}: --peft {job.model.peft} fails: {first_line_of(error)}"
        knows_no_layers = "specify `target_modules`" in problem and "target_modules" not in given
        remedy = "add --peft-arg target_modules=all-linear" if knows_no_layers else "check --peft-arg"
        return ModelError(f"{problem}; {remedy}, or see the traceback with --debug")

    with foreign_errors(explain):
        config = _configure(peft, model, job, given)
        with quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            adapted = run(lambda: peft.get_peft_model(model, config, **own))
    assert isinstance(adapted, nn.Module)
    return adapted


def _configure(peft: Any, model: nn.Module, job: Job, given: dict[str, Any]) -> Any:
    """Return peft's configuration for the job's method.

    The model's class determines the task type. Models of speech or images get no task type, since peft's
    classes for tasks call the model with `input_ids`. Raises UsageError for a method or a value that peft
    does not know.
    """
    method, preset = _VARIANTS.get(job.model.peft, (job.model.peft, {}))
    methods = {str(kind.value).lower(): config for kind, config in peft.PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    if method not in methods:
        near = nearest(method, (*methods, *_VARIANTS)) or ", ".join(sorted(methods)[:8]) + " ..."
        raise UsageError(f"--peft {shown(job.model.peft)}: peft has no such method; the nearest: {near}")
    known = inspect.signature(methods[method]).parameters
    for name in given:
        if name not in known:
            near = nearest(name, known)
            hint = f"; the nearest: {near}" if near else ""
            raise UsageError(f"--peft-arg {name}: {methods[method].__name__} has no such value{hint}")
    values = {**preset, **{name: _plain(name, value) for name, value in given.items()}}
    base = type(model).__name__
    is_of_text = "input_ids" in inspect.signature(type(model).forward).parameters
    task = next((task for part, task in _HEADS.items() if part in base), None) if is_of_text else None
    if "task_type" in known:
        values.setdefault("task_type", task)
    return methods[method](**values)


def _plain(name: str, value: Any) -> Any:
    """Return a tuple, or module names separated by commas, as a list, and other values unchanged.

    Regular expressions of module names, for example, are returned unchanged.
    """
    if isinstance(value, tuple):
        return list(value)
    is_names = isinstance(value, str) and re.fullmatch(r"[\w.]+(\s*,\s*[\w.]+)*", value)
    if name in _PLACES and is_names:
        return re.split(r"\s*,\s*", value)
    return value


def _adapt(model: BuiltModel, job: Job) -> BuiltModel:
    return BuiltModel(attach_adapters(model.module, job), model.loaded)


ADAPTERS = Technique(lambda job: bool(job.model.peft), change_model=_adapt)
