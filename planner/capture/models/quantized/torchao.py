"""Quantize linear layers by torchao.

Its weights consist of several tensors.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

from torch import nn

from planner.capture.cuda.devices.placed import PlacedResults
from planner.capture.cuda.devices.placement import current_placement
from planner.capture.models.libraries import import_library, quiet
from planner.errors import ModelError, UsageError
from planner.jobs import Job, Quantize, nearest

_TRAINING = "torchao.prototype.quantized_training"
_NF4 = "torchao.quantization.quantize_.workflows.nf4.nf4_tensor"
# Module and class of each configuration, and the values that it needs to run on kernels of torch alone.
_CONFIGS: Mapping[Quantize, tuple[str, str, Mapping[str, Any]]] = {
    Quantize.INT8_WEIGHT_ONLY: ("torchao.quantization", "Int8WeightOnlyConfig", {}),
    Quantize.INT4_WEIGHT_ONLY: (
        "torchao.quantization",
        "Int4WeightOnlyConfig",
        {"int4_packing_format": "tile_packed_to_4d"},
    ),
    Quantize.INT8_TRAINING: (_TRAINING, "int8_weight_only_quantized_training", {}),
    Quantize.INT8_MIXED: (_TRAINING, "int8_mixed_precision_training", {}),
}
_BOUND = ("torchao.quantization", _NF4)  # modules that register functions of torch by their identity


def prepare_torchao(path: Path) -> None:
    """Import torchao if a file mentions it. A capture later replaces functions that torchao binds."""
    if find_spec("torchao") is None:
        return
    with suppress(OSError):
        if "torchao" in path.read_text(encoding="utf-8", errors="replace"):
            import_torchao()


def prepare_quantization(job: Job) -> None:
    """Import torchao if the job quantizes by it. A capture later replaces functions that torchao binds."""
    if job.model.quantize.is_of_torchao:
        import_torchao()


def import_torchao() -> None:
    """Import the modules of torchao that bind functions of torch. Missing modules are skipped."""
    with quiet():
        for module in _BOUND:
            with suppress(ImportError):
                import_module(module)


def kept_modules(model: nn.Module, skipped: list[str] | None) -> list[str]:
    """Return the names of the modules that are not to be quantized, by the rule of the model's library.

    `skipped` are the modules that the job names, or None if it names none. transformers keeps the output
    layer and the modules that it holds in float32; diffusers keeps only the latter
    (`_process_model_before_weight_loading` of its quantizers). In a user's own module the last linear layer
    is kept, as transformers would.
    """
    in_float32: Any = getattr(model, "_keep_in_fp32_modules", None)
    if is_of_diffusers(model):
        return [*(skipped or ()), *(in_float32 or ())]
    if hasattr(model, "all_tied_weights_keys"):
        from transformers.quantizers.base import HfQuantizer

        kept: list[str] = HfQuantizer.get_modules_to_not_convert(model, skipped, in_float32)
        return kept
    if skipped is not None:
        return list(skipped)
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return linears[-1:]  # the output layer


def is_of_diffusers(model: nn.Module) -> bool:
    """Return whether a model's class derives from a class of diffusers."""
    return any(kind.__module__.startswith("diffusers.") for kind in type(model).__mro__)


def quantize_by_torchao(model: nn.Module, job: Job) -> nn.Module:
    """Quantize the model's linear layers by torchao in place.

    Returns the model. Each layer is quantized as it is moved to the GPU; for float8 training, layers are
    converted instead. All parameters are frozen unless quantized weights are trained. Raises UsageError for
    an unknown option, ModelError if the model has no linear layer that is quantized.
    """
    kept = tuple(f"{name}." for name in kept_modules(model, None))

    def is_quantized(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and not f"{name}.".startswith(kept)

    if not any(is_quantized(module, name) for name, module in model.named_modules()):
        raise ModelError(
            f"{job.model.name}: --quantize {job.model.quantize}: it has no linear layer that is quantized; "
            "remove it"
        )
    if job.model.quantize is Quantize.FLOAT8_TRAINING:
        float8: Any = import_library("torchao.float8", extra="optimizers")
        config = _configured(job, float8.Float8LinearConfig.from_recipe_name, {})
        float8.convert_to_float8_training(model, config=config, module_filter_fn=is_quantized)
    else:
        if not job.model.quantize.is_trained:
            model.requires_grad_(False)
        quantization: Any = import_library("torchao.quantization", extra="optimizers")
        config = _config_of(job)
        with PlacedResults(current_placement().placed):
            quantization.quantize_(model, config, filter_fn=is_quantized, device="cuda")
    return model


def _config_of(job: Job) -> Any:
    module, name, given = _CONFIGS[job.model.quantize]
    return _configured(job, getattr(import_library(module, extra="optimizers"), name), given)


def _configured(job: Job, make: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """Return the configuration that `make` makes from `given`, which the job's values override.

    Raises UsageError for a value that `make` does not take.
    """
    known = [name for name in signature(make).parameters if name != "version"]
    values = dict(job.model.quantize_arg)
    for name in values:
        if name not in known:
            near = nearest(name, known)
            hint = f"; the nearest: {near}" if near else f"; it has {', '.join(known)}" if known else ""
            raise UsageError(f"--quantize-arg {name}: {job.model.quantize} has no such value{hint}")
    if job.model.quantize is Quantize.FLOAT8_TRAINING:
        values.setdefault("recipe_name", "tensorwise")
    return make(**{**given, **values})
