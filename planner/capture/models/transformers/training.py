"""Derive the optimizer, model changes and loss of transformers' Trainer.

All settings are read from `TrainingArguments`, and the installed version's functions apply them.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn, optim

from planner.capture.loop.named_optimizers import is_optimizer_class
from planner.capture.models.live.optimizer import LiveOptimizer, is_torch_class, name_of_optimizer
from planner.capture.process_state import first_line_of
from planner.errors import UsageError
from planner.jobs import Optimizer

Step = Callable[[nn.Module, Mapping[str, Any]], Any]


def optimizer_of(arguments: Any, model: nn.Module) -> LiveOptimizer:
    """Return the class, groups and options of the Trainer's optimizer for a model.

    Raises UsageError if it is not planned. As in `Trainer.create_optimizer`, biases and norms form a separate
    group without weight decay, and an 8-bit optimizer of bitsandbytes keeps 32-bit states for embeddings.
    """
    from transformers import Trainer

    kind, given = _class_of(arguments, model)
    is_torchs = is_torch_class(kind)
    defaults = dict(kind([nn.Parameter(torch.zeros(1))], **given).defaults) if is_torchs else {}
    decayed = set(Trainer.get_decay_parameter_names(None, model))
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    first = tuple(name for name in names if name in decayed)
    rest = tuple(name for name in names if name not in decayed)
    groups = (
        (first, {**defaults, "weight_decay": arguments.weight_decay}),
        (rest, {**defaults, "weight_decay": 0.0}),
    )
    keeps_embeddings = kind.__module__.startswith("bitsandbytes") and given.get("optim_bits") == 8
    return LiveOptimizer(
        kind,
        tuple(group for group in groups if group[0]),
        {} if is_torchs else given,
        _keep_embeddings_in_32_bits if keeps_embeddings else None,
    )


def optimizer_name_of(arguments: Any) -> Optimizer | str:
    """Return a job's name for the Trainer's optimizer."""
    return name_of_optimizer(*_class_of(arguments, None))


def _class_of(arguments: Any, model: nn.Module | None) -> tuple[type[optim.Optimizer], dict[str, Any]]:
    """Return the class and the keyword arguments of the Trainer's optimizer.

    Raises UsageError for an optimizer that is not installed or not planned.
    """
    from transformers import Trainer

    name = getattr(arguments.optim, "value", arguments.optim)
    try:
        kind, given = Trainer.get_optimizer_cls_and_kwargs(arguments, model)
    except Exception as error:  # its library is missing, or it needs a model
        raise UsageError(f"optim {name} is not planned: {first_line_of(error)[:160]}") from error
    if not is_optimizer_class(kind) or {"params", "model", "optimizer_dict"} & given.keys():
        raise UsageError(
            f"optim {name} is not planned: it steps in hooks or on projections of gradients; use adamw_torch "
            "or plan with planner run"
        )
    return kind, given


def _keep_embeddings_in_32_bits(model: nn.Module) -> None:
    manager: Any = sys.modules["bitsandbytes.optim.optimizer"].GlobalOptimManager.get_instance()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})


def prepare_for_training(arguments: Any, model: nn.Module) -> None:
    """Set a model's `use_cache`, activation checkpointing and NEFTune noise as `Trainer.train` does."""
    if getattr(model, "config", None) is not None and hasattr(model.config, "use_cache"):
        model.config.use_cache = getattr(arguments, "use_cache", False)
    checkpoints = getattr(arguments, "activation_checkpointing", None) or arguments.gradient_checkpointing
    if checkpoints:
        _checkpoint(arguments, model)
    if arguments.neftune_noise_alpha is not None:
        from transformers.integrations.neftune import activate_neftune

        activate_neftune(model, arguments.neftune_noise_alpha)


def _checkpoint(arguments: Any, model: Any) -> None:
    given = dict(
        getattr(arguments, "activation_checkpointing_kwargs", None)
        or arguments.gradient_checkpointing_kwargs
        or {}
    )
    given.pop("offload", None)
    some = {"every_n_layers": given.pop("every_n_layers")} if "every_n_layers" in given else {}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=given or None, **some)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=given or None, **some)


def loss_step(arguments: Any) -> Step:
    """Return a step that computes the loss as `Trainer.compute_loss` does.

    The step drops the model's output.
    """
    shards = arguments.deepspeed or arguments.fsdp  # DeepSpeed's engine or FSDP2's policy casts instead
    autocasts = bool(arguments.fp16 or arguments.bf16) and not shards
    if arguments.label_smoothing_factor:
        from transformers.trainer_pt_utils import LabelSmoother

        smoother = LabelSmoother(epsilon=arguments.label_smoothing_factor)
    else:
        smoother = None

    def step(model: nn.Module, batch: Mapping[str, Any]) -> Any:
        inputs = dict(batch)
        labels = inputs.pop("labels", None) if smoother is not None else None
        outputs = model(**inputs)
        outputs = in_float32(outputs) if autocasts else outputs
        if smoother is not None and labels is not None:
            return smoother(outputs, labels, shift_labels=_is_causal(model))
        return outputs["loss"] if isinstance(outputs, dict) else outputs[0]

    return step


def in_float32(outputs: Any) -> Any:
    """Return a model's outputs with half-precision tensors converted to float32.

    accelerate does so if it autocasts the forward pass.
    """
    from accelerate.utils import convert_to_fp32

    return convert_to_fp32(outputs)


def _is_causal(model: nn.Module) -> bool:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
