"""Weights of bitsandbytes under LoRA, trained by a script with the calls of peft and transformers."""

from benchmarks.emulated.capabilities.case import Capability
from benchmarks.emulated.finetune_cases import LLAMA, Finetune, finetune_case

_LORA = {"peft": "lora", "peft_arg": {"r": 16, "target_modules": "all-linear"}}
_QV = {"peft": "lora", "peft_arg": {"r": 16, "target_modules": ["q_proj", "v_proj"]}}
_DOUBLE = {"bnb_4bit_use_double_quant": True}
_JOBS = (
    Finetune(quantize="nf4", **_LORA),
    Finetune(quantize="nf4", quantize_arg=_DOUBLE, prepare=True, **_LORA),
    Finetune(
        quantize="nf4", quantize_arg=_DOUBLE, prepare=True, checkpoint=True, batch=8, tokens=256, **_LORA
    ),
    Finetune(quantize="nf4", batch=16, tokens=256, gpu="A100 80GB", **_LORA),
    Finetune(quantize="nf4", batch=1, tokens=64, gpu="L4", **_LORA),
    Finetune(quantize="nf4", batch=4, tokens=64, gpu="H100", quantize_arg=_DOUBLE, **_LORA),
    Finetune(quantize="fp4", precision="fp16", **_LORA),
    Finetune(quantize="nf4", precision="fp16", gpu="T4", **_LORA),
    Finetune(quantize="nf4", quantize_arg={"bnb_4bit_compute_dtype": "float32"}, **_QV),
    Finetune("Qwen2ForCausalLM", LLAMA, quantize="nf4", quantize_arg=_DOUBLE, prepare=True, **_LORA),
    Finetune(quantize="nf4", peft="dora", peft_arg={"r": 16, "target_modules": ["q_proj", "v_proj"]}),
    Finetune(quantize="int8", **_LORA),
    Finetune(quantize="int8", prepare=True, batch=8, **_LORA),
    Finetune(quantize="int8", precision="fp16", **_LORA),
    Finetune(quantize="int8", precision="fp16", checkpoint=True, batch=8, tokens=256, **_QV),
    Finetune(quantize="int8", quantize_arg={"llm_int8_threshold": 0.0}, **_LORA),
    Finetune("Qwen2ForCausalLM", LLAMA, quantize="int8", gpu="A100 80GB", **_LORA),
    Finetune(quantize="int8", batch=1, tokens=64, gpu="L4", **_QV),
    Finetune(quantize="int8", batch=2, tokens=512, precision="fp16", gpu="H100", **_LORA),
    Finetune(quantize="int8", batch=16, **_QV),
    Finetune(quantize="int8", peft="dora", peft_arg={"r": 16, "target_modules": ["q_proj", "v_proj"]}),
)
CAPABILITY = Capability(
    "NF4, FP4 and LLM.int8() weights of bitsandbytes (`--quantize`)",
    tuple(finetune_case(number, job) for number, job in enumerate(_JOBS, start=1)),
)
