"""Generation by causal language models of transformers with a key-value cache that grows."""

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

CAPABILITY = Capability(
    "decoders of transformers that extend a prompt, in the planner's own loop on both sides",
    tuple(
        Case(
            DrawnJob(
                number,
                f"hf:{name}",
                batch,
                gpu,
                {"model_arg": sizes, "mode": "generate", "new_tokens": tokens, "precision": precision},
            )
        )
        for number, (name, batch, gpu, tokens, precision, sizes) in enumerate(_JOBS, 1)
    ),
)
