"""Shard a model as accelerate's FSDP2 plugin does.

The plugin is FullyShardedDataParallelPlugin. accelerate's own functions decide which modules are sharded
together, and shard a model on the CPU. Facts from accelerate 1.15 (utils/fsdp_utils.py).
"""

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn

from planner.capture.loop.checkpoint import name_kinds
from planner.capture.process_state import first_line_of
from planner.errors import UsageError
from planner.jobs import OF_PLUGIN, FsdpArguments

_WRAPPING = "TRANSFORMER_BASED_WRAP"  # transformers' default (training_args.py)
_OF_LAUNCHER = "FSDP_"  # prefix of variables from which a plugin reads options that it is not given


def shard_by_accelerate(
    model: nn.Module, arguments: FsdpArguments, options: Mapping[str, Any], mesh: Any
) -> str:
    """Shard a model in place as accelerate's plugin does, and return a note on the sharded classes.

    `arguments` are the plugin's options, and `options` are keywords of `fully_shard`. Raises UsageError if
    accelerate is not installed, or refuses the options or the model.
    """
    try:
        library = importlib.import_module("accelerate.utils")
        functions: Any = importlib.import_module("accelerate.utils.fsdp_utils")
        prepare, checkpoint = functions.fsdp2_prepare_model, functions.fsdp2_apply_ac
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"--fsdp-arg by=accelerate: accelerate does not import, or has no FSDP2 ({error}); pip install "
            "'gpu-batch-planner[accelerate]'"
        ) from error
    of_plugin = arguments.non_default(*OF_PLUGIN)
    policy = options["mp_policy"]
    with _environment_kept():
        try:
            plugin = library.FullyShardedDataParallelPlugin(
                fsdp_version=2,
                reshard_after_forward=options.get("reshard_after_forward", True),
                mixed_precision_policy=policy,
                cpu_ram_efficient_loading=False,
                **{"auto_wrap_policy": _WRAPPING, **of_plugin},
            )
            plugin.set_auto_wrap_policy(model)
            casts = policy.param_dtype not in (None, torch.float32)
            accelerator = SimpleNamespace(
                state=SimpleNamespace(fsdp_plugin=plugin),
                torch_device_mesh=mesh,
                parallelism_config=SimpleNamespace(fsdp_dim_names=mesh.mesh_dim_names),
                mixed_precision="bf16" if casts else "no",  # with "bf16", all weights become float32
                is_main_process=False,
            )
            if plugin.activation_checkpointing:
                checkpoint(accelerator, model)
            prepare(accelerator, model)
        except (ValueError, TypeError, AttributeError) as error:
            said = first_line_of(error)[:160]
            raise UsageError(f"--fsdp-arg by=accelerate: accelerate refuses: {said}") from error
    from torch.distributed.fsdp import FSDPModule

    units = name_kinds(module for module in model.modules() if isinstance(module, FSDPModule))
    return f"FSDP: sharded as accelerate's plugin does, from a model on the CPU: {units}"


@contextmanager
def _environment_kept() -> Iterator[None]:
    """Hide the variables `FSDP_...` of accelerate's launcher inside the context, and restore them on exit."""
    with mock.patch.dict("os.environ") as environment:
        for name in [name for name in environment if name.startswith(_OF_LAUNCHER)]:
            del environment[name]
        yield
