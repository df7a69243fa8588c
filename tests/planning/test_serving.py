"""Serving: blocks of a paged cache beside the weights, by sums that the tests write out."""

import json
from math import ceil

import pytest

import planner
from planner.api.serve import ServeResult
from planner.capture.models.registry import build_model
from planner.capture.models.transformers.serving import ServedModel, served_model
from planner.cli import run
from planner.errors import ModelError, UsageError
from planner.hardware.database import find_device
from planner.jobs import Job, parse_model_arg, resolve_job
from planner.planning.serving import (
    ServingSettings,
    activation_bytes,
    group_layers,
    layer_bytes,
    plan_serving,
    profile_bytes,
)
from tests.helpers.structs import replace

GIB = 2**30
# Llama of 8 billion parameters: 32 layers, 8 heads of 128 for keys and values.
LLAMA = ServedModel(
    name="llama",
    weight_bytes=15 * GIB,
    item_bytes=2,
    layers=32,
    cached_numbers=2 * 8 * 128,
    hidden=4096,
    queries=4096,
    keys=2 * 8 * 128,
    intermediate=14336,
    vocabulary=128256,
    positions=8192,
)
DRAFT = ServedModel("draft", GIB, 2, 16, 2 * 8 * 64, 2048, 2048, 2 * 8 * 64, 8192, 128256, 8192)
SMALL = ("hidden_size=64", "num_hidden_layers=2", "num_attention_heads=4", "vocab_size=100")


def job_of(name: str, *args: str) -> Job:
    """The job of `hf:NAME` with these --model-arg."""
    return resolve_job(f"hf:{name}", {}, model_args=[parse_model_arg(text) for text in args])


def test_a_token_has_keys_and_values_in_every_layer() -> None:
    """2 x 8 heads x 128 numbers x 2 bytes a layer; in fp8 half of it, in int8 with two floats a head."""
    assert layer_bytes(LLAMA, ServingSettings()) == 2 * 8 * 128 * 2
    assert layer_bytes(LLAMA, ServingSettings(kv_cache_dtype="fp8")) == 2 * 8 * 128
    scaled = ServingSettings(kv_cache_dtype="int8_per_token_head")
    assert layer_bytes(replace(LLAMA, key_heads=8), scaled) == 2 * 8 * 128 + 8 * 2 * 4
    plan = plan_serving(LLAMA, None, find_device("A100 80GB"), ServingSettings())
    assert plan.token_bytes == 32 * 2 * 8 * 128 * 2


def test_the_profile_run_is_the_widest_layer_or_the_sampler() -> None:
    """With many tokens the MLP decides, with few the logits of all sequences."""
    assert activation_bytes(LLAMA, 1000) == 2 * 1000 * (2 * 4096 + 3 * 14336)
    many = ServingSettings(max_num_batched_tokens=8192)
    assert profile_bytes(LLAMA, many) == activation_bytes(LLAMA, 8192)
    few = ServingSettings(max_num_batched_tokens=512, max_num_seqs=256)
    assert profile_bytes(LLAMA, few) == 2 * 512 * 4096 + 256 * 128256 * (2 + 4 + 4 + 4)


def test_what_is_left_is_divided_into_blocks() -> None:
    """The share of the GPU is weights, profile run, graphs, and the cache; one block is kept."""
    device = find_device("A100 80GB")
    plan = plan_serving(LLAMA, None, device, ServingSettings())
    assert plan.requested_bytes == ceil(device.usable.value * 0.92)
    parts = (plan.weight_bytes, plan.profile_bytes, plan.graph_bytes, plan.cache_bytes)
    assert sum(parts) == plan.requested_bytes
    assert plan.graph_bytes == activation_bytes(LLAMA, 512)
    assert plan.blocks == plan.cache_bytes // (16 * 131072) - 1
    assert plan.sequences == plan.blocks // (8192 // 16)
    assert plan.static_sequences == plan.cache_bytes // (8192 * 131072)


def test_sequences_end_in_blocks_of_their_own() -> None:
    """A sequence of 17 tokens takes two blocks of 16; more than max_num_seqs never run at once."""
    device = find_device("A100 80GB")
    plan = plan_serving(LLAMA, None, device, ServingSettings(max_model_len=17, max_num_seqs=100_000))
    assert plan.sequences == plan.blocks // 2
    assert plan_serving(LLAMA, None, device, ServingSettings(max_model_len=17)).sequences == 256


def test_a_draft_model_takes_weights_and_cache() -> None:
    """For speculative decoding both models hold weights, and keys and values of every token."""
    device = find_device("A100 80GB")
    alone, both = (plan_serving(LLAMA, draft, device, ServingSettings()) for draft in (None, DRAFT))
    assert both.weight_bytes == alone.weight_bytes + GIB
    assert both.token_bytes == alone.token_bytes + 16 * 2 * 8 * 64 * 2
    assert both.blocks < alone.blocks


def test_the_gpu_decides_what_is_not_set() -> None:
    """vLLM's API server takes larger steps on GPUs of 70 GiB and more, but for A100s."""
    sizes = {
        name: (settings.max_num_batched_tokens, settings.max_num_seqs)
        for name in ("H100 80GB", "A100 80GB", "L4")
        for settings in [ServingSettings().on(find_device(name))]
    }
    assert sizes == {"H100 80GB": (8192, 1024), "A100 80GB": (2048, 256), "L4": (2048, 256)}


def test_a_share_that_is_not_free_lets_no_server_start() -> None:
    """The whole GPU is never free, since the context is there first."""
    whole = ServingSettings(gpu_memory_utilization=1.0)
    plan = plan_serving(LLAMA, None, find_device("A100 80GB"), whole)
    assert (plan.starts, plan.blocks, plan.sequences) == (False, 0, 0)
    assert "The server does not start" in str(ServeResult(plan, 0.0))


@pytest.mark.parametrize(
    ("layers", "sliding", "expected"),
    [
        (32, 0, (32, 1, 0)),
        (32, 32, (32, 0, 1)),
        (24, 12, (12, 1, 1)),
        (30, 20, (10, 1, 2)),
        (25, 12, (13, 1, 1)),
        (34, 29, (5, 1, 6)),  # the last group of windows has a layer of padding
    ],
)
def test_layers_with_a_window_share_blocks_with_the_others(
    layers: int, sliding: int, expected: tuple[int, int, int]
) -> None:
    """Groups are as large as the rarer kind, or as the other where that is less than half as much more."""
    groups = group_layers(replace(LLAMA, layers=layers, sliding_layers=sliding, window=1024))
    assert (groups.layers, groups.full, groups.sliding) == expected


def test_a_window_takes_its_tokens_and_those_of_a_step() -> None:
    """Of 8,192 tokens, a window of 1,024 keeps 1,023 and the 2,048 of a step, in one block more."""
    hybrid = replace(LLAMA, layers=24, sliding_layers=12, window=1024)
    plan = plan_serving(hybrid, None, find_device("A100 80GB"), ServingSettings())
    assert plan.blocks == plan.cache_bytes // (16 * 12 * 4096) - 1
    blocks = 8192 // 16 + -(-(1023 + 2048) // 16) + 1
    assert plan.groups.blocks_of(8192, plan.settings) == blocks
    assert plan.sequences == plan.blocks // blocks
    assert plan.tokens == plan.blocks // 2 * 16


def test_weights_that_do_not_fit_leave_no_block() -> None:
    """A model larger than the GPU serves nothing."""
    plan = plan_serving(LLAMA, None, find_device("RTX 3060"), ServingSettings())
    assert plan.cache_bytes < 0
    assert (plan.blocks, plan.sequences, plan.static_sequences) == (0, 0, 0)


def test_sizes_come_from_the_configuration() -> None:
    """Weights are counted once where they are tied, latent attention caches one vector for all heads."""
    tied = job_of("LlamaForCausalLM", *SMALL, "num_key_value_heads=2", "tie_word_embeddings=true")
    model = build_model(tied)
    served = served_model(tied)
    assert served.cached_numbers == 2 * 2 * 16
    numbers = sum(one.numel() for one in model.parameters()) + sum(one.numel() for one in model.buffers())
    assert served.weight_bytes == 2 * numbers
    latent = served_model(
        job_of(
            "DeepseekV3ForCausalLM", *SMALL, "num_key_value_heads=4", "kv_lora_rank=32", "qk_rope_head_dim=8",
            "n_routed_experts=4", "n_group=1", "topk_group=1", "num_experts_per_tok=2",
        )
    )  # fmt: skip
    assert latent.cached_numbers == 32 + 8


def test_what_is_no_decoder_is_refused() -> None:
    """A classifier of images and an encoder with a decoder have no cache that is known here."""
    with pytest.raises(ModelError, match="is no decoder of transformers"):
        served_model(resolve_job("torchvision:alexnet", {}))
    with pytest.raises(ModelError, match="is no decoder of transformers"):
        served_model(job_of("t5", "d_model=32", "num_layers=1"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gpu_memory_utilization": 1.2}, "use a share above 0, at most 1"),
        ({"kv_cache_dtype": "int3"}, "use one of auto, float16"),
        ({"block_size": 0}, "use a whole number from 1 to 1024"),
    ],
)
def test_settings_that_no_server_has_are_refused(settings: dict[str, object], message: str) -> None:
    """Each setting is checked before the model is built."""
    with pytest.raises(UsageError, match=message):
        planner.serve("llama_8b", gpu="L4", settings=settings)


def test_the_command_prints_its_json(capsys: pytest.CaptureFixture[str]) -> None:
    """A small model: sequences, blocks and tokens agree, and nothing claims to be measured."""
    words = ["serve", "--model", "hf:LlamaForCausalLM", "--gpu", "L4", "--max-model-len", "100", "--json"]
    for text in SMALL:
        words += ["--model-arg", text]
    assert run(words) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["tokens"] == 16 * answer["blocks"]
    assert answer["sequences"] == 256
    assert answer["measured"] is False


@pytest.mark.parametrize(
    ("name", "args", "layers", "numbers"),
    [
        ("mamba", ("num_hidden_layers=2",), 2, 3 * 1536 + 1536 * 16),
        ("mamba2", ("num_hidden_layers=2",), 2, 3 * (8192 + 2 * 8 * 128) + 128 * 64 * 128),
        ("qwen3_next", ("num_hidden_layers=4", "num_experts=4"), 3, 3 * 8192 + 32 * 128 * 128),
        ("falcon_h1", ("num_hidden_layers=2",), 2, 3 * (1024 + 2 * 256) + 128 * 8 * 256),
    ],
)
def test_a_state_is_what_a_convolution_and_a_scan_carry_on(
    name: str, args: tuple[str, ...], layers: int, numbers: int
) -> None:
    """One input less than the convolution's kernel for each of its channels, and each channel's state."""
    model = served_model(job_of(name, *args))
    assert model.state_layers == layers
    assert model.state_bytes == 2 * numbers


def test_a_block_of_keys_is_as_large_as_a_state() -> None:
    """Qwen3-Next: 1,097,728 bytes of state are 536 tokens of 2 x 2 x 256 numbers, in 34 times 16 tokens; each
    sequence takes a block of each of three groups of layers with a state."""
    model = served_model(job_of("qwen3_next", "num_hidden_layers=4", "num_experts=4"))
    plan = plan_serving(model, None, find_device("A100 80GB"), ServingSettings(max_model_len=1000))
    assert layer_bytes(model, plan.settings) == 2 * 2 * 2 * 256
    assert plan.settings.block_size == 16 * ceil(1_097_728 / (16 * 2048)) == 544
    assert plan.groups.states == 3
    assert plan.groups.blocks_of(1000, plan.settings) == 2 + 3
    assert plan.blocks == plan.cache_bytes // (544 * 2048) - 1


def test_without_keys_each_sequence_takes_a_state() -> None:
    """Mamba: sequences of any length, one state of all layers for each; one stays empty."""
    model = served_model(job_of("mamba2", "num_hidden_layers=4"))
    settings = ServingSettings(max_num_seqs=10**6)
    plan = plan_serving(model, None, find_device("RTX 3060"), settings)
    assert plan.length == 0
    assert plan.sequences == plan.cache_bytes // (4 * model.state_bytes) - 1
    with pytest.raises(UsageError, match="remove --draft"):
        plan_serving(model, DRAFT, find_device("RTX 3060"), settings)
