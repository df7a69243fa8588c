"""All parameters of accelerate's `Accelerator`, which has some from the environment, and of its handlers."""

from collections.abc import Callable
from typing import Any

from planner.api.integrations.settings import COMPILED, Setting, harmless, planned, refused, stated, text_of

_BY_HAND = "train with DDP, or plan by hand with planner.max_batch"


def _is(kind: str) -> Callable[[Any], bool]:
    """Return whether an accelerator distributes in this way."""
    return lambda accelerator: text_of(accelerator.distributed_type) == kind


def _has_dynamo(accelerator: Any) -> bool:
    plugin = getattr(accelerator.state, "dynamo_plugin", None)
    return plugin is not None and text_of(plugin.backend) != "NO"


def _is_parallel(accelerator: Any) -> bool:
    return getattr(accelerator, "parallelism_config", None) is not None


def _splits(accelerator: Any) -> bool:
    return bool(accelerator.num_processes > 1 and accelerator.split_batches)


def _dispatches(accelerator: Any) -> bool:
    return bool(accelerator.num_processes > 1 and accelerator.dispatch_batches)


SETTINGS: tuple[Setting, ...] = (
    *planned("mixed_precision gradient_accumulation_steps gradient_accumulation_plugin"),
    *planned("kwargs_handlers"),  # by `HANDLERS`
    *planned("deepspeed_plugin"),  # by `deepspeed_fields`
    *harmless(
        "device_placement cpu rng_types log_with project_dir project_config step_scheduler_with_optimizer "
        "deepspeed_plugins"
    ),
    refused("split_batches", "each batch is divided among the processes; leave it away", _splits),
    stated(
        "dataloader_config",
        "dispatch_batches holds the batches of all processes on the first GPU; one is counted",
        _dispatches,
    ),
    refused("fsdp_plugin", f"parameters are sharded over GPUs; {_BY_HAND}", _is("FSDP")),
    refused("megatron_lm_plugin", f"the model is split over GPUs; {_BY_HAND}", _is("MEGATRON_LM")),
    refused("torch_tp_plugin", f"the model is split over GPUs; {_BY_HAND}", _is_parallel),
    refused("parallelism_config", f"the model is split over GPUs; {_BY_HAND}", _is_parallel),
    stated("dynamo_backend", COMPILED, _has_dynamo),
    *harmless("dynamo_plugin"),  # given by `dynamo_backend`, which is made into one
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

AUTOCAST: tuple[Setting, ...] = (
    refused(
        "enabled",
        "autocast is off; leave the handler away, with mixed_precision='no'",
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

# Classes of `kwargs_handlers`, the attribute that an accelerator has each under, and the settings of each.
HANDLERS: dict[str, tuple[str, tuple[Setting, ...]]] = {
    "DistributedDataParallelKwargs": ("ddp_handler", DDP),
    "AutocastKwargs": ("autocast_handler", AUTOCAST),
    "GradScalerKwargs": ("scaler_handler", SCALER),
}

# Recipes for FP8 come with mixed_precision="fp8", which is refused.
OTHER_HANDLERS = harmless(
    "InitProcessGroupKwargs ProfileKwargs FP8RecipeKwargs AORecipeKwargs TERecipeKwargs MSAMPRecipeKwargs"
)
