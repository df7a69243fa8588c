"""Tables of accelerate's settings: which are planned, refused, named in a note, or harmless.

The settings are all parameters of `Accelerator`, its environment and its handlers.
"""

from collections.abc import Callable
from typing import Any

from planner.api.integrations.settings import COMPILED, Setting, harmless, planned, refused, stated, text_of

_BY_HAND = "train with DDP, or plan by hand with planner.max_batch"


def _is(kind: str) -> Callable[[Any], bool]:
    """Return a function that returns whether an accelerator's distributed type is `kind`."""
    return lambda accelerator: text_of(accelerator.distributed_type) == kind


def _has_dynamo(accelerator: Any) -> bool:
    plugin = getattr(accelerator.state, "dynamo_plugin", None)
    return plugin is not None and text_of(plugin.backend) != "NO"


def _is_split(accelerator: Any) -> bool:
    config = getattr(accelerator, "parallelism_config", None)
    if config is None:
        return False
    sizes = [getattr(config, f"{name}_size", 1) for name in ("tp", "cp", "sp")]
    return not _is("FSDP")(accelerator) or any(size > 1 for size in sizes)


def _drops_fsdp(accelerator: Any) -> bool:
    if not _is("NO")(accelerator):
        return False
    from accelerate.utils import parse_flag_from_env

    return bool(parse_flag_from_env("ACCELERATE_USE_FSDP"))  # accelerate sets it if it gets a plugin


def _offloads(plugin: Any) -> bool:
    return type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy"


def _splits(accelerator: Any) -> bool:
    return bool(accelerator.num_processes > 1 and accelerator.split_batches)


def _dispatches(accelerator: Any) -> bool:
    return bool(accelerator.num_processes > 1 and accelerator.dispatch_batches)


SETTINGS: tuple[Setting, ...] = (
    *planned("mixed_precision gradient_accumulation_steps gradient_accumulation_plugin"),
    *planned("kwargs_handlers"),  # planned by `HANDLERS`
    *planned("deepspeed_plugin"),  # planned by `deepspeed_fields`
    *harmless(
        "device_placement cpu rng_types log_with project_dir project_config step_scheduler_with_optimizer "
        "deepspeed_plugins"
    ),
    refused("split_batches", "each batch is divided among the processes; remove it", _splits),
    stated(
        "dataloader_config",
        "dispatch_batches holds the batches of all processes on the first GPU; one is counted",
        _dispatches,
    ),
    refused(  # otherwise planned by `fsdp_fields`
        "fsdp_plugin",
        "accelerate drops it in a process alone; plan under accelerate launch, or by hand with "
        "planner.max_batch(..., fsdp=8, fsdp_arg=['by=accelerate'])",
        _drops_fsdp,
    ),
    refused("megatron_lm_plugin", f"the model is split over GPUs; {_BY_HAND}", _is("MEGATRON_LM")),
    refused("torch_tp_plugin", f"the model is split over GPUs; {_BY_HAND}", _is_split),
    refused(
        "parallelism_config",
        "the model is split over GPUs; dp_replicate_size and dp_shard_size are planned with fsdp_plugin",
        _is_split,
    ),
    stated("dynamo_backend", COMPILED, _has_dynamo),
    *harmless("dynamo_plugin"),  # made from `dynamo_backend`
)

# Fields of DistributedDataParallel's handlers; Lightning's `DDPStrategy` takes them as keywords.
DDP: tuple[Setting, ...] = (
    *planned("gradient_as_bucket_view"),
    *harmless("dim broadcast_buffers find_unused_parameters check_reduction static_graph comm_state_option"),
    stated(
        "bucket_cap_mb",
        "gradient buckets are planned with 25 MiB",
        lambda handler: handler.bucket_cap_mb not in (None, 25),
    ),
    stated(
        "comm_hook",
        "buckets are planned without it; compression keeps other copies of them",
        lambda handler: text_of(handler.comm_hook) not in ("no", "None"),
    ),
    stated(
        "comm_wrapper",
        "buckets are planned without it",
        lambda handler: text_of(handler.comm_wrapper) not in ("no", "None"),
    ),
)

# Fields of FullyShardedDataParallelPlugin.
FSDP: tuple[Setting, ...] = (
    *planned(
        "fsdp_version reshard_after_forward mixed_precision_policy auto_wrap_policy activation_checkpointing "
        "transformer_cls_names_to_wrap min_num_params"
    ),
    # Settings of checkpoints, and of FSDP 1, which is refused
    *harmless(
        "state_dict_type state_dict_config optim_state_dict_config sharding_strategy backward_prefetch "
        "limit_all_gathers use_orig_params param_init_fn sync_module_states forward_prefetch"
    ),
    refused("cpu_offload", "parameters and their optimizer are on the CPU; remove it", _offloads),
    refused("ignored_modules", "modules that are not sharded stay whole; remove it"),
    refused(
        "activation_checkpointing_offload",
        "activations move to the CPU; remove it",
    ),
    stated(
        "cpu_ram_efficient_loading",
        "planned as if each rank had the whole model on its CPU, and moved it block by block; with it the "
        "first rank moves tensor by tensor, which takes less before the first step",
    ),
)

AUTOCAST: tuple[Setting, ...] = (
    refused(
        "enabled",
        "autocast is off; remove the handler, with mixed_precision='no'",
        lambda one: not one.enabled,
    ),
    stated(
        "cache_enabled",
        "planned with autocast's cache of converted weights",
        lambda one: one.cache_enabled is False,
    ),
)

SCALER: tuple[Setting, ...] = (
    *planned("enabled"),
    *harmless("init_scale growth_factor backoff_factor growth_interval"),
)

# By class of `kwargs_handlers`: the accelerator's attribute with the handler, and the handler's settings.
HANDLERS: dict[str, tuple[str, tuple[Setting, ...]]] = {
    "DistributedDataParallelKwargs": ("ddp_handler", DDP),
    "AutocastKwargs": ("autocast_handler", AUTOCAST),
    "GradScalerKwargs": ("scaler_handler", SCALER),
}

# Recipes for FP8 come with mixed_precision="fp8", which is refused.
OTHER_HANDLERS = harmless(
    "InitProcessGroupKwargs ProfileKwargs FP8RecipeKwargs AORecipeKwargs TERecipeKwargs MSAMPRecipeKwargs"
)
