"""Losses that keep no logits: Liger's kernels, run by Triton on the emulated side."""

from typing import Any

from benchmarks.emulated.capabilities.case import Capability
from benchmarks.emulated.finetune_cases import LLAMA, Finetune, finetune_case

_LIGER: dict[str, Any] = {"script": {"liger": True}, "options": {"liger": True}}
_LORA: dict[str, Any] = {"peft": "lora", "peft_arg": {"r": 16, "target_modules": "all-linear"}}
_WIDE = {**LLAMA, "vocab_size": 64000}
_JOBS = (
    Finetune(**_LIGER),
    Finetune(config=_WIDE, batch=8, tokens=256, **_LIGER),
    Finetune(config=_WIDE, batch=8, tokens=256, checkpoint=True, **_LIGER),
    Finetune(config=_WIDE, precision="fp32", **_LIGER),
    Finetune(config=_WIDE, precision="amp-bf16", batch=8, **_LIGER),
    Finetune(config=_WIDE, batch=16, gpu="A100 80GB", **_LIGER),
    Finetune(config=_WIDE, batch=8, tokens=256, **_LORA, **_LIGER),
    Finetune(config=_WIDE, batch=8, quantize="nf4", **_LORA, **_LIGER),
    Finetune("Qwen2ForCausalLM", _WIDE, batch=8, **_LIGER),
    Finetune("MistralForCausalLM", _WIDE, batch=4, tokens=512, gpu="L4", **_LIGER),
    Finetune("Qwen3ForCausalLM", {**_WIDE, "head_dim": 64}, batch=8, **_LIGER),
    Finetune("Phi3ForCausalLM", {**_WIDE, "pad_token_id": 0}, batch=8, gpu="H100", **_LIGER),
)
CAPABILITY = Capability(
    "Liger's fused cross entropy and layers (`--liger`)",
    tuple(finetune_case(number, job) for number, job in enumerate(_JOBS, start=1)),
)
