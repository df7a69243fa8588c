"""Tensor parallel by the plans of transformers, alone and within FSDP2."""

from benchmarks.emulated.capabilities.case import Capability
from benchmarks.emulated.capabilities.sharded import LLAMA_WITHOUT_CACHE, MIXED, ShardedJob, case_of

_SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8000,
    "use_cache": False,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
_CASES = (
    ShardedJob(tp=2),
    ShardedJob(config={**LLAMA_WITHOUT_CACHE, "num_key_value_heads": 4}, ranks=4, tp=4, clip=True),
    ShardedJob(ranks=4, tp=2, policy=MIXED, implementation="fused"),
    ShardedJob(ranks=4, tp=2, clip=True, gpu="H100 80GB"),
    ShardedJob(tp=2, checkpoint=True, accumulate=2, gpu="RTX 3090"),
    ShardedJob("Qwen2ForCausalLM", _SMALL, tp=2, gpu="RTX 4090"),
    ShardedJob("Qwen3ForCausalLM", {**_SMALL, "head_dim": 64}, tp=2, accumulate=2),
    ShardedJob("MixtralForCausalLM", {**_SMALL, "num_local_experts": 4}, tp=2, shape=(4, 512)),
    ShardedJob("Qwen3MoeForCausalLM", {**_SMALL, **_EXPERTS}, tp=2, ranks=4, shape=(4, 512)),
    ShardedJob("LlamaForCausalLM", {**_SMALL, "tie_word_embeddings": True}, tp=2),
    ShardedJob("Phi3ForCausalLM", {**_SMALL, "pad_token_id": 0}, tp=2, optimizer="SGD"),
    ShardedJob("LlamaForCausalLM", {**_SMALL, "vocab_size": 8001}, tp=2, gpu="RTX 3090"),
)
CAPABILITY = Capability(
    "tensor parallel by the plans of transformers, alone and within FSDP2, under torchrun; the first rank is "
    "compared",
    tuple(case_of(number, job) for number, job in enumerate(_CASES, 1)),
)
