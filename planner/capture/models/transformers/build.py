"""Build models of transformers from a type, a class or a folder.

Nothing is fetched from a hub. `hf:bert` is a model type with its default configuration and the head of its
task, `hf:LlamaForCausalLM` a class with its default configuration, `hf:FOLDER` a folder with a config.json.
Arguments of the job go to the configuration (`a__b` to `b` of the sub-configuration `a`), with three
exceptions: `task` selects the head of a model type or a folder, `padded` says whether the attention mask
masks anything, and `attn_implementation` is transformers' argument of that name.
"""

import copy
import importlib
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from planner.capture.models.libraries import quiet, read_json
from planner.capture.models.transformers.contents import OBJECTS, is_detector, takes_masks
from planner.capture.patching import patched
from planner.errors import ModelError, UsageError
from planner.jobs import Job, Loss, Mode, nearest, shown, split_model

SOURCE = "hf"

# Without a task, a model type gets the first of these tasks for which it has a class.
TASKS = (
    *("zero-shot-image-classification", "seq2seq-lm", "speech-seq2seq", "masked-lm", "causal-lm"),
    *("image-classification", "audio-classification", "video-classification", "sequence-classification"),
    *("token-classification", "question-answering", "multiple-choice", "next-sentence-prediction"),
    *("semantic-segmentation", "ctc", "pretraining", "features"),
)
_RANDOM = ("apply_spec_augment", "layerdrop", "encoder_layerdrop", "decoder_layerdrop")
_DEPTH = "num_hidden_layers"
_OWN_ARGUMENTS = ("task", "padded", "attn_implementation")

# Names of modules that are tables of learned positions.
_POSITIONS = ("wpe", "embed_positions", "position_embedding", "position_embeddings", "positions_embed")


@dataclass(frozen=True, slots=True)
class TransformersClass:
    """A class of transformers with its configuration."""

    model_class: Any  # a subclass of transformers.PreTrainedModel
    config: Any  # a transformers.PreTrainedConfig

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """Return the parameters of the model class's forward method, by name."""
        return inspect.signature(self.model_class.forward).parameters


def is_of_transformers(job: Job) -> bool:
    """Return whether the job's model comes from transformers."""
    return split_model(job.model.origin).source == SOURCE


def is_padded(job: Job) -> bool:
    """Return whether a job's batches count as padded: not if a transformers model has `padded=False`."""
    return not (is_of_transformers(job) and dict(job.model.args).get("padded", True) is False)


def notes_of(job: Job, model: object) -> tuple[str, ...]:
    """Return notes on assumptions about a transformers model's inputs, or () for other models."""
    if not is_of_transformers(job):
        return ()
    keywords = {spec.keyword for spec in job.samples.inputs}
    notes = []
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    tokens = max((spec.shape[-1] for spec in job.samples.inputs if spec.keyword == "input_ids"), default=0)
    tokens += job.loop.new_tokens if job.loop.mode is Mode.GENERATE else 0
    if isinstance(positions, int) and tokens > positions > 0:
        notes.append(
            f"{tokens:,} tokens are more than the {positions:,} positions of the configuration: a model that "
            f"looks its positions up in a table fails; --model-arg max_position_embeddings={tokens}"
        )
    if "attention_mask" in keywords and is_padded(job):
        notes.append(
            "batches are assumed to be padded, so attention uses a mask; "
            "--model-arg padded=false plans for batches without padding"
        )
    elif "attention_mask" in keywords:
        notes.append("batches are assumed to have no padding (padded=false): there is no attention mask")
    config = getattr(model, "config", None)
    if getattr(config, "vision_config", None) is not None and "pixel_values" not in keywords:
        notes.append(
            "the model sees text alone; for images give their input, such as --input pixel_values=3x336x336, "
            "with a text that has room for their tokens"
        )
    name = type(model).__name__
    of_objects = is_detector(name) or takes_masks(name)
    if of_objects and job.loop.mode is Mode.TRAIN and job.loop.loss is Loss.OUTPUT:
        notes.append(f"each image has {OBJECTS} objects, as COCO's have in the mean")
    if "input_values" in keywords and "apply_spec_augment" not in dict(job.model.args):
        notes.append("SpecAugment and LayerDrop, which are random, are disabled")
    return tuple(notes)


def choose_class(transformers: Any, name: str, arguments: Mapping[str, Any]) -> TransformersClass:
    """Return the class that `hf:NAME` names, with its configuration.

    The job's arguments complete the configuration. Raises UsageError for an unknown name, task or argument.
    """
    task = arguments.get("task")
    if task is not None and task not in TASKS:
        raise UsageError(f"--model-arg task={task}: unknown task; use one of {', '.join(TASKS)}")
    if not isinstance(arguments.get("padded", True), bool):
        raise UsageError("--model-arg padded: expected true or false")
    given = {key: value for key, value in arguments.items() if key not in _OWN_ARGUMENTS}
    with quiet():
        choice = _choose(transformers, name, task, given)
    if arguments.get("attn_implementation") is not None:
        choice.config._attn_implementation = arguments["attn_implementation"]
    _complete_config(choice.config, choice.model_class, given)
    return choice


def _choose(transformers: Any, name: str, task: str | None, given: Mapping[str, Any]) -> TransformersClass:
    folder, types = Path(name), transformers.CONFIG_MAPPING
    named: Any = getattr(transformers, name, None) if name.isidentifier() else None
    if folder.is_dir():
        file_config = _read_config(folder)
        config = _configure(_config_class(transformers, file_config, folder), file_config, given)
        model_class = _class_of_folder(transformers, config, file_config, task)
    elif name in types:
        config = _configure(types[name], {}, given)
        model_class = _class_of_type(transformers, name, task)
    elif getattr(named, "config_class", None) is not None and hasattr(named, "forward"):
        config, model_class = _configure(named.config_class, {}, given), named
    else:
        raise _unknown(transformers, name)
    return TransformersClass(model_class, config)


def _complete_config(config: Any, model_class: Any, given: Mapping[str, Any]) -> None:
    """Set values that training needs but defaults leave open, and disable random regularization.

    No such value decides memory. Regularization that `given` sets stays: SpecAugment masks the same number of
    frames in any case, and a plan is made for steps in which LayerDrop skips no layer.
    """
    if "ForSequenceClassification" in model_class.__name__ and getattr(config, "pad_token_id", 0) is None:
        config.pad_token_id = 0  # decoders refuse batches above 1 without one
    start = getattr(config, "decoder_start_token_id", None)
    if getattr(config, "is_encoder_decoder", False) and start is None:
        config.decoder_start_token_id = 0  # labels are shifted behind it
    if getattr(config, "image_token_index", 0) is None:
        config.image_token_index = config.get_text_config().vocab_size - 1  # any token will do
    for name in _RANDOM:
        if getattr(config, name, 0) and name not in given:
            setattr(config, name, type(getattr(config, name))())


def depth_argument(transformers: Any, name: str, arguments: Mapping[str, Any]) -> tuple[str, int] | None:
    """Return (name, value) of the argument that sets the number of blocks, or None if blocks differ.

    None is also returned if the model is an encoder-decoder, or if another argument counts the blocks. Raises
    UsageError as `choose_class` does.
    """
    config = choose_class(transformers, name, arguments).config
    blocks = getattr(config, _DEPTH, None)
    kinds = set(getattr(config, "layer_types", None) or ())
    if not isinstance(blocks, int) or len(kinds) > 1 or getattr(config, "is_encoder_decoder", False):
        return None
    return _DEPTH, blocks


def build(transformers: Any, name: str, **arguments: Any) -> nn.Module:
    """Return the model `hf:NAME` in float32. The dtype in its configuration is ignored."""
    choice = choose_class(transformers, name, arguments)
    with offline():
        model: nn.Module = choice.model_class(choice.config)
    if "return_loss" in choice.parameters:
        _return_loss(model)
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding) and path.rpartition(".")[2] in _POSITIONS:
            _refuse_longer_inputs(module, f"hf:{name}: {path}", model.config)
    return model


def _refuse_longer_inputs(table: nn.Embedding, name: str, config: Any) -> None:
    """Make a table of learned positions raise ModelError for inputs longer than the table.

    The first positions of a table with a padding index count too, since padded tokens share that index.
    """
    most = table.num_embeddings - getattr(table, "offset", 0)
    is_of_config = getattr(config, "max_position_embeddings", None) == most

    def check(_: nn.Module, inputs: tuple[Any, ...]) -> None:
        length = inputs[0].shape[-1] if inputs and isinstance(inputs[0], Tensor) and inputs[0].dim() else 0
        if length > most:
            more = f", or --model-arg max_position_embeddings={length}" if is_of_config else ""
            problem = f"{name} has {most:,} positions, and its input is {length:,} long"
            raise ModelError(f"{problem}; give at most {most:,}{more}")

    table.register_forward_pre_hook(check)


@contextmanager
def offline() -> Iterator[None]:
    """Keep huggingface_hub from the network inside the context, as HF_HUB_OFFLINE does."""
    with patched(importlib.import_module("huggingface_hub.constants"), "HF_HUB_OFFLINE", True):
        yield


def _return_loss(model: nn.Module) -> None:
    """Make an image-text model return its loss, by passing `return_loss=True` to its forward method.

    The argument is passed in training, and in evaluations after the first call in training mode.
    """
    forward, is_trained = model.forward, False

    def forward_with_loss(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_trained
        is_trained = is_trained or model.training
        return forward(*args, **kwargs, return_loss=True) if is_trained else forward(*args, **kwargs)

    model.forward = forward_with_loss


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    file_config = read_json(path, "a folder with a config.json")
    if not isinstance(file_config, dict):
        raise ModelError(f"{path}: is no JSON object; mend the file")
    return file_config


def _config_class(transformers: Any, file_config: Mapping[str, Any], folder: Path) -> Any:
    kind = file_config.get("model_type")
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        raise ModelError(
            f"{folder / 'config.json'}: model_type {kind!r} is none that transformers "
            f"{transformers.__version__} ships; code from elsewhere is not run"
        )
    return transformers.CONFIG_MAPPING[kind]


def _class_of_folder(transformers: Any, config: Any, file_config: Mapping[str, Any], task: str | None) -> Any:
    """Return the class for `task`, or without it the folder's first architecture or its type's default."""
    architectures = file_config.get("architectures") or []
    if task is None and architectures:
        model_class = getattr(transformers, str(architectures[0]), None)
        if model_class is None:
            raise ModelError(
                f"transformers {transformers.__version__} has no class {architectures[0]!r}, "
                "which config.json names"
            )
        return model_class
    return _class_of_type(transformers, config.model_type, task)


def _table_of(task: str) -> str:
    """Return the name of transformers' mapping from model types to the classes for a task.

    Source: models/auto/modeling_auto.py.
    """
    if task == "features":
        return "MODEL_MAPPING_NAMES"
    words = {"seq2seq-lm": "seq_to_seq_causal_lm", "speech-seq2seq": "speech_seq_2_seq"}
    return f"MODEL_FOR_{words.get(task, task).replace('-', '_').upper()}_MAPPING_NAMES"


def _class_of_type(transformers: Any, kind: str, task: str | None) -> Any:
    tables = importlib.import_module("transformers.models.auto.modeling_auto")
    by_task = {name: getattr(tables, _table_of(name), {}) for name in TASKS}
    of_type = {name: classes[kind] for name, classes in by_task.items() if kind in classes}
    if not of_type or (task is not None and task not in of_type):
        classes = ", ".join(of_type) or "no class of its own"
        raise UsageError(f"hf:{kind}: transformers has no class for {task or 'this type'}; it has {classes}")
    names = of_type[task or next(iter(of_type))]
    return getattr(transformers, names if isinstance(names, str) else names[0])


def _configure(config_class: Any, file_config: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
    """Return a configuration with the values in `given`, or else in the file, or else the defaults.

    Raises UsageError for a key that the configuration lacks, which transformers would ignore.
    """
    whole = copy.deepcopy(dict(file_config))
    if "num_labels" in given:  # otherwise the number of label names in the file would win
        whole.pop("id2label", None)
        whole.pop("label2id", None)
    config = config_class.from_dict(copy.deepcopy(whole))
    for key, value in given.items():
        inside, target = config, whole
        *parents, last = key.split("__")
        for parent in parents:
            inside = getattr(inside, parent, None)
            target = target.setdefault(parent, _set_values(inside))
        if not hasattr(inside, "attribute_map"):
            raise _no_argument(config, key)
        if not hasattr(inside, last):
            raise _no_argument(inside, last)
        target[inside.attribute_map.get(last, last)] = value
    return config_class.from_dict(whole)


def _set_values(part: Any) -> dict[str, Any]:
    """Return the values of a sub-configuration that differ from defaults.

    The model type is included. {} if `part` is not a configuration.
    """
    if not hasattr(part, "to_dict"):
        return {}
    defaults = type(part)().to_dict()
    values = {name: value for name, value in part.to_dict().items() if value != defaults.get(name)}
    return values | {"model_type": part.model_type}


def _no_argument(config: Any, key: str) -> UsageError:
    near = nearest(key, (name for name in config.to_dict() if not name.startswith("_")))
    hint = f"; the nearest: {near}" if near else ""
    return UsageError(f"--model-arg {key}: {type(config).__name__} has no such value{hint}")


def _unknown(transformers: Any, name: str) -> UsageError:
    if "/" in name:
        return UsageError(
            f"model {shown('hf:' + name)}: there is no such folder, and nothing is fetched from a hub; "
            "save its config.json into a folder and name that as hf:FOLDER"
        )
    names = [*transformers.CONFIG_MAPPING.keys(), *(key for key in dir(transformers) if "For" in key)]
    near = nearest(name, names)
    hint = f"the nearest: {near}" if near else "name a model type, a class or a folder with config.json"
    if "-" in name:  # as names on a hub have it
        hint += "; nothing is fetched from a hub: for a model of one, save its config.json and name hf:FOLDER"
    return UsageError(f"transformers has no model type or class {shown(name)}; {hint}")
