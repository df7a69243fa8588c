"""Convert accelerate's FSDP plugin to a job's fields.

The plugin may also be made from transformers' arguments.
"""

import functools
from collections.abc import Mapping
from typing import Any
from unittest import mock

from planner.api.integrations import accelerate_settings
from planner.api.integrations.settings import notes_of
from planner.errors import UsageError
from planner.jobs import FsdpArguments, Precision

_WRAPS = {
    "transformer_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "size_based_auto_wrap_policy": "SIZE_BASED_WRAP",
}
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_OF_POLICY = ("param_dtype", "reduce_dtype", "output_dtype")
_MIXED = {Precision.AMP_BF16: "bf16", Precision.AMP_FP16: "fp16"}


def fsdp_fields(
    plugin: Any,
    fields: Mapping[str, Any],
    ranks: int,
    owner: str,
    syncs_each: bool = False,
    replicas: int = 1,
) -> dict[str, Any]:
    """Return a copy of a job's fields, updated from accelerate's FSDP2 plugin for training on `ranks` ranks.

    `fields` are the job's fields from a framework. `plugin` is accelerate's; `owner` names the setting in
    errors. `ranks` is the number of processes, which a user's `fsdp` overrides. With `syncs_each`, gradients
    are reduced after each micro-batch. `replicas` is the number of copies of the sharded model. Raises
    UsageError for settings that are not planned.
    """
    if plugin.fsdp_version != 2:
        raise UsageError(f"{owner}: fsdp_version {plugin.fsdp_version} is not planned: set fsdp_version=2")
    if fields["grad_scaler"]:
        raise UsageError(f"{owner} with fp16 is not planned: the loss is scaled; use bf16")
    given: dict[str, Any] = {
        "by": "accelerate",
        "reshard_after_forward": bool(plugin.reshard_after_forward),
        "gradient_sync": "each" if syncs_each else "last",
        **_policy(plugin, fields["precision"], owner),
        **_wrapping(plugin),
        **({"activation_checkpointing": True} if plugin.activation_checkpointing else {}),
        "replicas": replicas,
    }
    return {
        **fields,
        "fsdp": ranks if ranks > 1 else 0,
        "fsdp_arg": FsdpArguments(**given),
        "precision": Precision.FP32,  # the policy has the precision
        "ddp": False,
        "ddp_bucket_view": False,
    }


def notes_of_plugin(plugin: Any, owner: str) -> tuple[str, ...]:
    """Return a note for each setting of a plugin that is in use and not planned.

    Raises UsageError for refused settings.
    """
    return notes_of(accelerate_settings.FSDP, plugin, owner)


def plugin_of_arguments(arguments: Any) -> Any:
    """Return the FSDP plugin that transformers' Trainer creates from its arguments.

    Raises UsageError for XLA.
    """
    from accelerate import FullyShardedDataParallelPlugin

    if (arguments.fsdp_config or {}).get("xla"):
        raise UsageError("TrainingArguments: fsdp_config: xla is not planned: plans are for NVIDIA GPUs")
    with mock.patch.dict("os.environ"):
        given = getattr(arguments, "fsdp_plugin_args", None) or arguments._process_fsdp_args()
        return FullyShardedDataParallelPlugin(**given)


def _policy(plugin: Any, precision: Precision, owner: str) -> dict[str, str]:
    """Return the dtypes of the plugin's mixed-precision policy.

    Without a policy, they are accelerate's defaults for `precision`.
    """
    policy = plugin.mixed_precision_policy
    if policy is None:  # accelerate/state.py, AcceleratorState
        mixed = _MIXED.get(precision)
        return dict.fromkeys(_OF_POLICY, mixed) if mixed else {}
    chosen = {}
    for key in _OF_POLICY:
        dtype = getattr(policy, key, None)
        if dtype is not None:
            name = str(dtype).removeprefix("torch.")
            if name not in _DTYPES:
                raise UsageError(f"{owner}: {key} {name} is not planned; use one of {', '.join(_DTYPES)}")
            chosen[key] = _DTYPES[name]
    return chosen


def _wrapping(plugin: Any) -> dict[str, Any]:
    """Return the plugin's settings for choosing modules to shard separately.

    An unknown policy function counts as no wrapping, as in accelerate.
    """
    policy = plugin.auto_wrap_policy
    if isinstance(policy, functools.partial):
        policy = policy.func
    kind = _WRAPS.get(getattr(policy, "__name__", ""), "NO_WRAP")
    chosen: dict[str, Any] = {"auto_wrap_policy": kind}
    if kind == "TRANSFORMER_BASED_WRAP" and plugin.transformer_cls_names_to_wrap:
        chosen["transformer_cls_names_to_wrap"] = tuple(plugin.transformer_cls_names_to_wrap)
    if kind == "SIZE_BASED_WRAP":
        chosen["min_num_params"] = plugin.min_num_params
    return chosen
