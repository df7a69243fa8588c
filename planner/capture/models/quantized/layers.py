"""Quantize the weights of linear layers by bitsandbytes or torchao.

bitsandbytes quantizes to 4 or 8 bits. The quantizer of the model's library chooses the layers: in
transformers all `nn.Linear` except the output embeddings and the last module, in diffusers all. Each weight
is quantized on the GPU before the next weight is moved there, so its copy in the model's type is allocated
and freed (bitsandbytes/nn/modules.py, `_quantize`).
"""

import copy
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from planner.capture.models.libraries import import_library, quiet
from planner.capture.models.quantized.torchao import is_of_diffusers, kept_modules, quantize_by_torchao
from planner.capture.process_state import first_line_of, foreign_errors
from planner.errors import ModelError, UsageError
from planner.jobs import Job, Precision, Quantize, nearest
from planner.program import BLOCK

_COMPUTED = {
    Precision.BF16: "bfloat16", Precision.AMP_BF16: "bfloat16",
    Precision.FP16: "float16", Precision.AMP_FP16: "float16",
}  # fmt: skip
_CLASSES = ("Params4bit", "Int8Params")
_MIB = 2**20


def quantize_linears(model: nn.Module, job: Job) -> nn.Module:
    """Quantize the model's linear layers in place as the job says, and return the model.

    Layers of bitsandbytes replace the model's layers, and quantize only when they are moved to the GPU;
    torchao quantizes at once. Without `--quantize` the model is unchanged. Raises UsageError for an unknown
    or unsuitable option, ModelError if nothing is replaced or a library fails.
    """
    if job.model.quantize is Quantize.NONE:
        return model

    def explain(error: BaseException) -> ModelError:
        problem = f"{job.model.name}: --quantize {job.model.quantize} fails: {first_line_of(error)}"
        return ModelError(f"{problem}; check --quantize-arg, or see the traceback with --debug")

    with foreign_errors(explain), quiet():
        if job.model.quantize.is_of_torchao:
            quantize_by_torchao(model, job)
        else:
            import_library("bitsandbytes", extra="bitsandbytes")
            import_library("transformers", extra="hf")
            _replace_linears(model, job)
    return model


def _replace_linears(model: nn.Module, job: Job) -> None:
    config = _configure(job)
    before = dict(model.named_modules())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _replace_by_library(model, kept_modules(model, config.llm_int8_skip_modules), config)
    for name, module in model.named_modules():
        old = before.get(name)
        if old is module or not isinstance(old, nn.Module):
            continue
        weight: Any = old.weight
        data = weight.data.t() if type(old).__name__ == "Conv1D" else weight.data
        made: Any = module.weight
        module.weight = type(made)(data, requires_grad=False, **vars(made))
        if old.bias is not None:
            module.bias = old.bias
    if not any(True for _ in quantized_modules(model)):
        raise ModelError(
            f"{job.model.name}: --quantize {job.model.quantize}: {_why_nothing_is_quantized(before)}; remove "
            "it"
        )
    is_4bit = job.model.quantize is not Quantize.INT8
    for one in (model, *(child for child in model.modules() if hasattr(child, "all_tied_weights_keys"))):
        vars(one)["is_loaded_in_4bit"], vars(one)["is_loaded_in_8bit"] = is_4bit, not is_4bit
    vars(model)["is_quantized"] = True
    for parameter in model.parameters():
        parameter.requires_grad_(False)


def _why_nothing_is_quantized(modules: Mapping[str, nn.Module]) -> str:
    others = {type(one).__name__ for one in modules.values() if isinstance(one, nn.Linear)} - {"Linear"}
    if not others:
        return "it has no linear layer that is quantized"
    return f"its linear layers are of the class {min(others)}, which bitsandbytes does not replace"


def _replace_by_library(model: nn.Module, kept: list[str], config: Any) -> None:
    if is_of_diffusers(model):
        library: Any = import_library("diffusers.quantizers.bitsandbytes.utils", extra="diffusers")
        library.replace_with_bnb_linear(model, modules_to_not_convert=kept, quantization_config=config)
        return
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear

    if not hasattr(model, "all_tied_weights_keys"):  # transformers matches a name also as the end of others
        kept = [f"^{re.escape(name)}$" for name in kept] if config.llm_int8_skip_modules is None else kept
    replace_with_bnb_linear(model, kept, config)


def _configure(job: Job) -> Any:
    from transformers import BitsAndBytesConfig

    given = dict(job.model.quantize_arg)
    known = [name for name in vars(BitsAndBytesConfig()) if not name.startswith("_")]
    known = [*known, "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage", "llm_int8_threshold"]
    for name in given:
        if name not in known or name in ("bnb_4bit_quant_type", "load_in_4bit", "load_in_8bit"):
            near = nearest(name, known)
            hint = f"; the nearest: {near}" if near else ""
            raise UsageError(f"--quantize-arg {name}: BitsAndBytesConfig has no such value here{hint}")
    given = {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}
    if job.model.quantize is Quantize.INT8:
        return BitsAndBytesConfig(load_in_8bit=True, **given)
    given.setdefault("bnb_4bit_compute_dtype", _COMPUTED.get(job.loop.precision, "float32"))
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=str(job.model.quantize), **given)


def quantized_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) for each module whose weight has a class of bitsandbytes."""
    for name, module in model.named_modules():
        parameters = module._parameters  # no dict in a TorchScript module
        if "weight" in parameters and type(parameters["weight"]).__name__ in _CLASSES:
            yield name, module


def quantized_on_meta(weight: Any, memo: dict[int, Any]) -> nn.Parameter | None:
    """Return the meta counterpart of a weight that bitsandbytes has quantized, or None for other weights.

    The counterparts of the tensors and states that belong to the weight are added to `memo`, the memo of a
    `copy.deepcopy`, since modules hold them too.
    """
    if type(weight).__name__ not in _CLASSES or not _is_quantized(weight):
        return None
    held = {name: _held_on_meta(value, memo) for name, value in vars(weight).items() if name != "module"}
    data = torch.empty_like(weight.data, device="meta")
    like: nn.Parameter = type(weight)(data, weight.requires_grad, **held)
    return like


def _held_on_meta(value: Any, memo: dict[int, Any]) -> Any:
    """Return the meta counterpart of a tensor or `QuantState`, or any other value itself.

    The counterpart is added to `memo`.
    """
    if isinstance(value, Tensor):
        memo[id(value)] = torch.empty_like(value, device="meta")
    elif type(value).__name__ == "QuantState":
        like = copy.copy(value)
        for name, one in vars(value).items():
            setattr(like, name, _held_on_meta(one, memo))
        memo[id(value)] = like
    return memo.get(id(value), value)


def quantize_on_meta(model: nn.Module) -> dict[int, list[Tensor]]:
    """Quantize a model's meta weights of bitsandbytes, and return the tensors allocated for each module.

    The result maps a module's id to its tensors in the order of allocation, as moving the module to the GPU
    allocates them. For a weight that is quantized already, they are the tensors that it consists of.
    """
    every = [module for _, module in quantized_modules(model)]
    modules = [module for module in every if not _is_quantized(module.weight)]
    ready = {id(module): _parts(module) for module in every if module not in modules}
    if not modules:
        return ready
    functional: ModuleType = import_library("bitsandbytes.functional", extra="bitsandbytes")
    tables = {"dynamic": torch.empty(256, device="meta")}  # shared by all weights
    allocated = ready
    with mock.patch.dict(functional.name2qmap, tables, clear=True), torch.no_grad():
        for module in modules:
            weight: Any = module.weight
            allocated[id(module)] = _quantize(weight, tables["dynamic"])
    return allocated


def _parts(module: Any) -> list[Tensor]:
    """Return the tensors of which a module's quantized weight consists.

    The scales of an 8-bit weight are in the module's state after its first call.
    """
    weight = module.weight
    if type(weight).__name__ == "Int8Params":
        scales = weight.SCB if weight.SCB is not None else module.state.SCB
        return [weight.data, *(() if scales is None else (scales,))]
    state, parts = weight.quant_state, [weight.data]
    while state is not None:
        parts += [one for one in (state.absmax, state.code, state.offset) if isinstance(one, Tensor)]
        state = state.state2
    return parts


def _is_quantized(weight: Any) -> bool:
    if type(weight).__name__ == "Int8Params":
        return bool(weight.has_fp16_weights or weight.dtype is torch.int8)
    return bool(weight.bnb_quantized)


def _quantize(weight: Any, table: Tensor) -> list[Tensor]:
    half = torch.float16 if type(weight).__name__ == "Int8Params" else weight.dtype
    copied = torch.empty(weight.shape, dtype=half, device="meta")
    weight._quantize("meta")
    if type(weight).__name__ == "Int8Params":
        return [copied, weight.SCB, weight.CB]
    state = weight.quant_state
    code = [state.code, torch.empty_like(state.code), torch.empty(1, device="meta")]  # scaled by its maximum
    if not state.nested:
        return [copied, state.absmax, weight.data, *code]
    absmax = torch.empty(state.absmax.shape, dtype=torch.float32, device="meta")
    return [
        *(copied, absmax, weight.data, *code, state.offset, absmax.clone(), table),
        *(state.state2.absmax, state.absmax, state.state2.code),
    ]


def adapters_as_made(model: nn.Module) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield (parameter, tensor before the cast) for each trained adapter parameter that peft casts.

    The tensor is uninitialised. The order is the order of creation. peft moves each adapter of a quantized
    layer to the GPU in the type in which the layer computes, and casts all of them afterwards
    (`_move_adapter_to_device_of_base_layer`, peft/tuners/tuners_utils.py).
    """
    for module in model.modules():
        dtype = getattr(getattr(module, "base_layer", None), "compute_dtype", None)
        for parameter in module.parameters() if dtype is not None else ():
            if parameter.requires_grad and parameter.dtype is not dtype:
                yield parameter, torch.empty_like(parameter, dtype=dtype, requires_grad=False)


def prepare_for_kbit_training(model: nn.Module) -> None:
    """Cast frozen weights of a quantized model to float32 and empty the cache, as `--prepare-kbit` plans."""
    cast_to_float32(model)
    torch.cuda.empty_cache()


def cast_to_float32(model: nn.Module) -> None:
    """Cast a model's frozen half-precision weights to float32, except quantized weights.

    peft's `prepare_model_for_kbit_training` does the same.
    """
    for parameter in model.parameters():
        is_half = parameter.dtype in (torch.float16, torch.bfloat16)
        if is_half and not parameter.requires_grad and type(parameter).__name__ not in _CLASSES:
            parameter.data = parameter.data.to(torch.float32)


def notes_on_quantized(job: Job, model: nn.Module) -> tuple[str, ...]:
    """Return notes on loading, outliers and unquantized parts for frozen quantized weights, or ()."""
    if job.model.quantize is Quantize.NONE or job.model.quantize.is_trained:
        return ()
    notes = [
        "weights are quantized one after another as the model is moved to the GPU; loading checkpoints in "
        "another way may need more meanwhile"
    ]
    if job.model.quantize is Quantize.INT8:
        notes.append("no activation is taken for an outlier of LLM.int8(), whose columns are kept in 16 bits")
    if not job.model.quantize.is_of_torchao:
        notes += _notes_on_unquantized(model)
    return tuple(notes)


def _notes_on_unquantized(model: nn.Module) -> list[str]:
    """Return a note each for the largest block and the weights outside blocks, if mostly unquantized.

    A part counts if its unquantized weights take over 1 MiB. Only linear layers are quantized; the experts of
    a mixture are often parameters of a single other module. The weights of one repeated block are compared,
    and the weights outside blocks, so that the notes do not depend on the number of blocks.
    """
    whole: dict[str, dict[str, int]] = {}  # block ("" outside blocks) -> weight -> bytes
    quantized: Counter[str] = Counter()  # bytes by block
    for name, parameter in model.named_parameters():
        found = BLOCK.search(name)
        block = name[: found.end()] if found else ""
        if type(parameter).__name__ in _CLASSES:
            quantized[block] += parameter.nbytes
        else:
            whole.setdefault(block, {})[name] = parameter.nbytes
    notes = []
    largest_block = max(whole, key=lambda block: sum(whole[block].values()) if block else -1, default="")
    for block in dict.fromkeys(("", largest_block)):
        sizes = whole.get(block, {})
        whole_bytes = sum(sizes.values())
        if whole_bytes <= max(quantized[block], _MIB):
            continue
        place = f"of {block}" if block else "outside the repeated blocks" if len(whole) > 1 else "of weights"
        unquantized = (
            f"{whole_bytes / _MIB:,.1f} MiB stay in their own type, next to {quantized[block] / _MIB:,.1f}"
        )
        notes.append(
            f"most memory {place} is not quantized: {unquantized} MiB, since linear layers alone are; the "
            f"largest is {max(sizes, key=lambda name: sizes[name])}"
        )
    return notes
