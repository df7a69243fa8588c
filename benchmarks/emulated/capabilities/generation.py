"""Generation by decoders of transformers: the planner's own loop, and scripts that call `generate`."""

import json
from collections.abc import Iterator
from typing import Any

from benchmarks.emulated.capabilities.case import Capability, Case
from benchmarks.emulated.jobs import DrawnJob

_SIZES = {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 8}
_GROUPED = {**_SIZES, "num_key_value_heads": 2, "intermediate_size": 512}
_JOBS: tuple[tuple[str, int, str, int, str, dict[str, Any]], ...] = (
    ("LlamaForCausalLM", 8, "RTX 3090", 40, "bf16", _GROUPED),
    ("LlamaForCausalLM", 3, "A100 40GB", 300, "fp16", {**_GROUPED, "padded": False}),
    ("Qwen2ForCausalLM", 5, "L4", 24, "bf16", _GROUPED),
    ("Qwen3ForCausalLM", 4, "RTX 4090", 33, "bf16", {**_GROUPED, "head_dim": 32}),
    ("MistralForCausalLM", 6, "H100 80GB", 20, "fp32", {**_GROUPED, "sliding_window": 64}),
    ("Gemma2ForCausalLM", 2, "A10", 17, "bf16", {**_GROUPED, "head_dim": 32}),
    ("GPT2LMHeadModel", 7, "T4", 30, "fp16", {"n_embd": 256, "n_layer": 3, "n_head": 8}),
    ("OPTForCausalLM", 4, "RTX 3060", 12, "fp32", {**_SIZES, "ffn_dim": 512, "word_embed_proj_dim": 256}),
    ("GPTNeoXForCausalLM", 5, "RTX 2080 Ti", 25, "fp16", {**_SIZES, "intermediate_size": 512}),
    ("PhiForCausalLM", 3, "RTX 5090", 50, "bf16", {**_SIZES, "intermediate_size": 512}),
    ("MixtralForCausalLM", 2, "A100 80GB", 10, "bf16", {**_GROUPED, "num_local_experts": 4}),
)

_FILE = "benchmarks/emulated/capabilities/scripts/generate.py"
_SCRIPTS: tuple[tuple[int, str, int, dict[str, Any]], ...] = (
    (4, "RTX 3090", 64, {}),
    (6, "L4", 48, {"do_sample": True, "num_return_sequences": 4}),
    (3, "A100 40GB", 64, {"cache_implementation": "static"}),
    (8, "RTX 4090", 40, {"cache_implementation": "static", "window": 16, "new_tokens": 30}),
    (4, "H100 80GB", 64, {"num_beams": 4}),
    (2, "T4", 33, {"num_beams": 3, "num_return_sequences": 3, "new_tokens": 20}),
    (4, "RTX 3060", 64, {"num_beams": 2, "cache_implementation": "static"}),
    (5, "A10", 64, {"prefill_chunk_size": 16}),
    (2, "RTX 3090", 50, {"window": 16, "new_tokens": 25}),
    (3, "RTX 5090", 32, {"num_beams": 4, "do_sample": True, "layers": 5}),
    (4, "RTX 3090", 64, {"cache_implementation": "offloaded"}),
    (3, "L4", 48, {"cache_implementation": "offloaded_static"}),
    (1, "A100 40GB", 40, {"assisted": True, "do_sample": True, "new_tokens": 20}),
    (1, "RTX 3060", 64, {"assisted": True, "do_sample": True, "new_tokens": 12, "layers": 6}),
)


def _cases() -> Iterator[Case]:
    for number, (name, batch, gpu, tokens, precision, sizes) in enumerate(_JOBS, 1):
        options = {"model_arg": sizes, "mode": "generate", "new_tokens": tokens, "precision": precision}
        yield Case(DrawnJob(number, f"hf:{name}", batch, gpu, options))
    for number, (batch, gpu, tokens, given) in enumerate(_SCRIPTS, len(_JOBS) + 1):
        options = {"input": f"{tokens}:int64", "model_arg": given}
        words = ("--batch-size", str(batch), "--tokens", str(tokens), "--options", json.dumps(given))
        job = DrawnJob(number, f"{_FILE}:Generation", batch, gpu, options)
        yield Case(job, (_FILE, *words), stop_after=0)


CAPABILITY = Capability(
    "decoders of transformers: the planner's own loop on both sides, and scripts with `generate`, its "
    "caches, beams and samples",
    tuple(_cases()),
)
