"""Adapters of peft and weights of bitsandbytes: what is trained, what is held, and what is refused."""

from collections import Counter
from typing import Any, cast

import pytest
import torch
from torch import nn

from planner.capture.models.live.job import copy_weightless
from planner.capture.models.meta_init import construct_on_meta
from planner.capture.models.quantized.layers import quantize_linears, quantize_on_meta, quantized_modules
from planner.capture.models.registry import construct_model, find_constructor
from planner.capture.session import record
from planner.errors import ModelError, UsageError
from planner.jobs import Job, parse_model_arg, parse_tensor_spec, resolve_job
from planner.planning.programs import complete_from_library
from planner.program.events import Alloc, Category, Free, Phase, PhaseStart, Trace
from tests.helpers.models import AMPERE

BATCH = 2
WIDTH, INNER, LAYERS, WORDS = 64, 128, 2, 256
LLAMA = (
    f"hidden_size={WIDTH}",
    f"intermediate_size={INNER}",
    f"num_hidden_layers={LAYERS}",
    "num_attention_heads=4",
    "num_key_value_heads=4",
    f"vocab_size={WORDS}",
)
LINEARS = LAYERS * (4 * WIDTH * WIDTH + 3 * WIDTH * INNER)  # elements
OTHERS = 2 * WORDS * WIDTH + (2 * LAYERS + 1) * WIDTH  # embeddings, output layer and norms


def job_with(*args: str, **options: Any) -> Job:
    """The job of a small Llama."""
    given = [parse_model_arg(text) for text in (*LLAMA, *args)]
    options = {"precision": "bf16", "optimizer": "adamw", **options}
    inputs = [parse_tensor_spec("16:int64")]
    job = resolve_job("hf:LlamaForCausalLM", {}, model_args=given, inputs=inputs, **options)
    return complete_from_library(job)


def trace_of(job: Job, batch: int) -> Trace:
    """The trace of a job."""
    return record(job, batch, AMPERE)


def held_bytes(trace: Trace) -> Counter[Category]:
    """Bytes by category at the end of the last step."""
    alive: dict[int, Alloc] = {}
    for event in trace.events:
        match event:
            case Alloc():
                alive[event.block] = event
            case Free():
                del alive[event.block]
            case PhaseStart(phase=Phase.END):
                break
    held: Counter[Category] = Counter()
    for block in alive.values():
        held[block.category] += block.size_bytes
    return held


def test_lora_trains_its_matrices_alone() -> None:
    """Two matrices of rank 8 in float32 beside each projection, with their gradients and two moments."""
    adapters = LAYERS * 2 * 2 * 8 * WIDTH * 4
    held = held_bytes(trace_of(job_with(peft="lora", peft_arg=["target_modules=q_proj,v_proj"]), BATCH))
    assert held[Category.PARAMETER] - (LINEARS + OTHERS) * 2 - adapters in range(4096)  # tables of positions
    assert (held[Category.GRADIENT], held[Category.OPTIMIZER]) == (adapters, 2 * adapters)


def test_dora_adds_a_magnitude_for_each_row() -> None:
    """A vector as long as the projection has rows."""
    arguments = ["r=4", "target_modules=[q_proj, down_proj]"]
    lora, dora = (held_bytes(trace_of(job_with(peft=m, peft_arg=arguments), BATCH)) for m in ("lora", "dora"))
    assert dora[Category.GRADIENT] - lora[Category.GRADIENT] == LAYERS * 2 * WIDTH * 4


def test_adapters_have_the_type_that_peft_is_told() -> None:
    """Half the bytes without `autocast_adapter_dtype`."""
    arguments = ["target_modules=q_proj", "autocast_adapter_dtype=false"]
    held = held_bytes(trace_of(job_with(peft="lora", peft_arg=arguments), BATCH))
    assert held[Category.GRADIENT] == LAYERS * 2 * 8 * WIDTH * 2


@pytest.mark.parametrize(("arguments", "statistics"), [([], 4), (["bnb_4bit_use_double_quant=true"], 1)])
def test_four_bits_and_statistics_are_held_for_each_weight(arguments: list[str], statistics: int) -> None:
    """Half a byte an element and a number for each 64; embeddings, output layer and norms stay."""
    held = held_bytes(trace_of(job_with(quantize="nf4", quantize_arg=arguments, mode="infer"), BATCH))
    expected = LINEARS // 2 + statistics * LINEARS // 64 + OTHERS * 2
    small = held[Category.PARAMETER] - expected
    assert 0 <= small <= LAYERS * 7 * (1024 + 64 + 4 + 4 * 2) + 4096  # code tables and their statistics


def test_notes_name_the_weights_that_stay() -> None:
    """The experts of a mixture are no linear layers; what is said does not depend on the number of blocks."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "vocab_size": 4096}
    said = []
    for model, layers in (("llama", 2), ("mixtral", 2), ("mixtral", 3)):
        arguments = {**sizes, "num_hidden_layers": layers}
        if model == "mixtral":
            arguments |= {"num_local_experts": 4, "num_key_value_heads": 4}
        given = [parse_model_arg(f"{name}={value}") for name, value in arguments.items()]
        options = {"precision": "bf16", "mode": "infer", "quantize": "nf4"}
        inputs = [parse_tensor_spec("16:int64")]
        job = resolve_job(f"hf:{model}", {}, model_args=given, inputs=inputs, **options)
        notes = trace_of(complete_from_library(job), 1).notes
        said.append([note for note in notes if note.startswith("most memory")])
    plain, shallow, deep = said
    assert [note.split(":")[0] for note in plain] == [
        "most memory outside the repeated blocks is not quantized"
    ]
    assert shallow == deep
    assert shallow[0] == plain[0]
    assert shallow[1].startswith("most memory of model.layers.0 is not quantized: 3.0 MiB stay")
    assert shallow[1].endswith("the largest is model.layers.0.mlp.experts.gate_up_proj")


def test_eight_bits_are_held_for_each_weight() -> None:
    """A byte an element and a float for each row."""
    held = held_bytes(trace_of(job_with(quantize="int8", mode="infer"), BATCH))
    rows = LAYERS * 4 * (5 * WIDTH + 2 * INNER)
    assert held[Category.PARAMETER] - (LINEARS + rows + OTHERS * 2) in range(4096)


def test_preparation_casts_the_rest_to_float32() -> None:
    """`prepare_model_for_kbit_training` doubles what is not quantized."""
    plain, prepared = (
        held_bytes(trace_of(job_with(quantize="nf4", prepare_kbit=is_prepared, mode="infer"), BATCH))
        for is_prepared in (False, True)
    )
    assert prepared[Category.PARAMETER] - plain[Category.PARAMETER] == OTHERS * 2


def test_each_weight_is_on_the_gpu_before_it_is_quantized() -> None:
    """A copy in the model's type is allocated and freed while the model is moved."""
    trace = trace_of(job_with(quantize="nf4", mode="infer"), BATCH)
    freed = {event.block for event in trace.events if isinstance(event, Free)}
    sizes = [
        event.size_bytes
        for event in trace.events
        if isinstance(event, Alloc) and trace.sites[event.site].op == "quantize" and event.block in freed
    ]
    assert sum(size for size in sizes if size > 64) == LINEARS * 2  # the rest are code tables


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"peft": "lorra"}, "the nearest: .*lora"),
        ({"peft": "lora", "peft_arg": ["rank=8"]}, "--peft-arg rank: LoraConfig has no such value"),
        ({"peft_arg": ["r=8"]}, "--peft-arg without --peft"),
        ({"quantize_arg": ["llm_int8_threshold=0"]}, "--quantize-arg without --quantize"),
        ({"quantize": "nf4", "quantize_arg": ["double_quant=true"]}, "bnb_4bit_use_double_quant"),
        ({"prepare_kbit": True}, "--prepare-kbit without --quantize"),
        ({"peft": "lora", "peft_arg": ["r"]}, "write KEY=VALUE"),
    ],
)
def test_what_is_unknown_is_refused(options: dict[str, Any], message: str) -> None:
    """Methods, values and combinations that mean nothing are refused in one line."""
    with pytest.raises(UsageError, match=message) as refused:
        trace_of(job_with(**options), BATCH)
    assert "\n" not in str(refused.value)


def test_a_model_that_peft_refuses_is_named() -> None:
    """Modules that the model lacks are peft's to find."""
    with pytest.raises(ModelError, match="--peft lora fails: .*no_such.*; check --peft-arg"):
        trace_of(job_with(peft="lora", peft_arg=["target_modules=no_such"]), BATCH)


@pytest.mark.parametrize(
    ("model", "arguments", "options", "message"),
    [
        (
            "marian",
            ("d_model=64", "encoder_layers=1", "decoder_layers=1", "vocab_size=256", "pad_token_id=0"),
            {"peft": "lora"},
            "Please specify `target_modules` .*; add --peft-arg target_modules=all-linear, or see",
        ),
        (
            "falcon",
            ("hidden_size=64", "num_hidden_layers=1", "num_attention_heads=4", "vocab_size=256"),
            {"quantize": "nf4"},
            "linear layers are of the class FalconLinear, which bitsandbytes does not replace; remove it",
        ),
    ],
)
def test_layers_that_a_library_does_not_find_are_named_with_a_remedy(
    model: str, arguments: tuple[str, ...], options: dict[str, Any], message: str
) -> None:
    """peft knows no projections of a model, or transformers quantizes no subclass of a linear layer."""
    job = resolve_job(f"hf:{model}", {}, model_args=[parse_model_arg(one) for one in arguments], **options)
    with pytest.raises(ModelError, match=message):
        trace_of(complete_from_library(job), BATCH)


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_a_quantized_module_in_use_is_copied_with_its_statistics(quantize: str) -> None:
    """The copy of a model that is quantized already holds as much as one that a job names, without the
    originals' contents.
    """
    model = quantize_linears(construct_model(job_with(), find_constructor(job_with()), lambda make: make()),
                             job_with(quantize=quantize, precision="fp32"))  # fmt: skip
    for _, module in quantized_modules(model):
        module.weight = module.weight.to("cpu") if quantize == "int8" else module.weight._quantize("cpu")
    copied = copy_weightless(model)
    parts = quantize_on_meta(copied)
    held = sum(part.untyped_storage().nbytes() for tensors in parts.values() for part in tensors)
    assert all(part.is_meta for tensors in parts.values() for part in tensors)
    rows = LAYERS * 4 * (5 * WIDTH + 2 * INNER)
    tables = len(parts) * 16 * 4  # the code of NF4
    assert held == (LINEARS // 2 + 4 * LINEARS // 64 + tables if quantize == "nf4" else LINEARS + rows)


def test_adapters_that_a_script_adds_have_the_type_of_the_weights() -> None:
    """peft gives adapters on a GPU the type of the weight beside them; so it is on meta."""
    peft = pytest.importorskip("peft")

    def construct() -> nn.Module:
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).to("cuda", dtype=torch.float16)
        return cast(nn.Module, peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["0"], r=2), net))

    model = construct_on_meta(construct)
    assert isinstance(model, nn.Module)
    types = {name.split(".")[1]: one.dtype for name, one in model.named_parameters() if "lora" in name}
    assert types == {"lora_A": torch.float16, "lora_B": torch.float16}


class Block(nn.Module):
    """Two layers, the second of which has the name of the network's last one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.proj_out = nn.Linear(16, 64), nn.Linear(64, 16)


class Network(nn.Module):
    """Blocks and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.proj_out = nn.Sequential(Block(), Block()), nn.Linear(16, 4)


def test_a_module_of_ones_own_keeps_its_last_layer_alone() -> None:
    """A layer in a block that has the name of the output layer is quantized."""
    model = quantize_linears(Network(), job_with(quantize="nf4", precision="bf16"))
    names = [name for name, _ in quantized_modules(model)]
    assert names == [f"blocks.{number}.{layer}" for number in (0, 1) for layer in ("first", "proj_out")]


def test_diffusers_quantizes_the_last_layer_too() -> None:
    """The rule of diffusers has no output layer."""
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.FluxTransformer2DModel(
        num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8), in_channels=8,
    )  # fmt: skip
    linears = [name for name, one in model.named_modules() if type(one) is nn.Linear]
    assert "proj_out" in linears and "single_transformer_blocks.0.proj_out" in linears
    quantize_linears(model, job_with(quantize="nf4", precision="bf16"))
    assert [name for name, _ in quantized_modules(model)] == linears


def test_a_model_of_speech_is_adapted_without_a_task() -> None:
    """peft's class for the task calls a model with texts, which Whisper does not take."""
    arguments = {"encoder_layers": 1, "decoder_layers": 1, "d_model": 32, "vocab_size": 60000}
    arguments |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    job = resolve_job(
        "hf:whisper",
        {},
        model_args=list(arguments.items()),
        peft="lora",
        peft_arg=["target_modules=q_proj,v_proj"],
        optimizer="adam",
    )
    trace = record(complete_from_library(job), 1, AMPERE)
    assert any(isinstance(event, Alloc) and event.category is Category.OPTIMIZER for event in trace.events)
