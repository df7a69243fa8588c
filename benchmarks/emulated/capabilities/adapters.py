"""Adapters of peft on models of transformers, trained by a script with peft's own calls."""

from benchmarks.emulated.capabilities.case import Capability
from benchmarks.emulated.finetune_cases import LLAMA, Finetune, finetune_case

_QV = {"r": 16, "target_modules": ["q_proj", "v_proj"]}
_ALL = {"r": 8, "target_modules": "all-linear"}
_GPT2 = {"n_layer": 3, "n_embd": 384, "n_head": 6, "vocab_size": 16000}
_JOBS = (
    Finetune(peft="lora", peft_arg=_QV),
    Finetune(peft="lora", peft_arg={**_ALL, "lora_dropout": 0.1}, batch=8),
    Finetune(peft="lora", peft_arg=_ALL, checkpoint=True, batch=8, tokens=256),
    Finetune(peft="lora", peft_arg={**_QV, "bias": "all"}, precision="fp32"),
    Finetune(peft="lora", peft_arg=_ALL, precision="amp-bf16"),
    Finetune(peft="lora", peft_arg={**_QV, "modules_to_save": ["lm_head"]}, precision="fp16"),
    Finetune(peft="dora", peft_arg=_QV),
    Finetune(peft="dora", peft_arg={**_ALL, "lora_dropout": 0.05}, batch=8),
    Finetune(peft="dora", peft_arg=_QV, checkpoint=True, gpu="A100 80GB"),
    Finetune(peft="rslora", peft_arg={"r": 64, "target_modules": ["q_proj", "v_proj"]}),
    Finetune(peft="ia3"),
    Finetune(peft="loha", peft_arg=_QV),
    Finetune(peft="vera", peft_arg={"r": 64, "target_modules": ["q_proj"]}),
    Finetune(peft="oft", peft_arg={"oft_block_size": 32, "target_modules": ["q_proj", "v_proj"]}),
    Finetune(peft="prefix_tuning", peft_arg={"num_virtual_tokens": 16}),
    Finetune(peft="prompt_tuning", peft_arg={"num_virtual_tokens": 16}),
    Finetune(peft="ln_tuning"),
    Finetune("GPT2LMHeadModel", _GPT2, peft="lora", peft_arg={"r": 8, "fan_in_fan_out": True}),
    Finetune("OPTForCausalLM", {"num_hidden_layers": 3, "hidden_size": 384, "ffn_dim": 1536,
             "num_attention_heads": 6, "word_embed_proj_dim": 384, "vocab_size": 16000}, peft="lora"),
    Finetune("Qwen2ForCausalLM", LLAMA, peft="lora", peft_arg=_ALL, gpu="L4", batch=8),
)  # fmt: skip
CAPABILITY = Capability(
    "LoRA, DoRA and other methods of peft (`--peft`)",
    tuple(finetune_case(number, job) for number, job in enumerate(_JOBS, start=1)),
)
