"""Serving: blocks of a paged cache beside the weights, by sums that the tests write out."""

import json

import pytest

import planner
from planner.capture.models.registry import build_model
from planner.capture.models.transformers.serving import ServedModel, served_model
from planner.cli import run
from planner.errors import ModelError, UsageError
from planner.hardware.database import find_device
from planner.jobs import Job, parse_model_arg, resolve_job
from planner.planning.serving import (
    ServingSettings,
    activation_bytes,
    plan_serving,
    profile_bytes,
    token_bytes,
)

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
    """2 x 32 layers x 8 heads x 128 numbers x 2 bytes; in fp8 half of it."""
    assert token_bytes(LLAMA, ServingSettings()) == 2 * 32 * 8 * 128 * 2
    assert token_bytes(LLAMA, ServingSettings(kv_cache_dtype="fp8")) == 2 * 32 * 8 * 128


def test_the_profile_run_is_the_widest_layer_or_the_sampler() -> None:
    """With many tokens the MLP decides, with few the logits of all sequences."""
    assert activation_bytes(LLAMA, 1000) == 2 * 1000 * (2 * 4096 + 3 * 14336)
    many = ServingSettings(max_num_batched_tokens=8192)
    assert profile_bytes(LLAMA, many) == activation_bytes(LLAMA, 8192)
    few = ServingSettings(max_num_batched_tokens=512, max_num_seqs=256)
    assert profile_bytes(LLAMA, few) == 2 * 512 * 4096 + 256 * 128256 * (2 + 4 + 4)


def test_what_is_left_is_divided_into_blocks() -> None:
    """The share of the GPU is the context, weights, profile run, graphs, and the cache; one block is kept."""
    device = find_device("A100 80GB")
    plan = plan_serving(LLAMA, None, device, ServingSettings())
    assert plan.requested_bytes == int(device.usable.value * 0.9)
    parts = (device.context.value, plan.weight_bytes, plan.profile_bytes, plan.graph_bytes, plan.cache_bytes)
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
        ({"gpu_memory_utilization": 1.2}, "use a share from 0 to 1"),
        ({"kv_cache_dtype": "int3"}, "use one of auto, fp8"),
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
