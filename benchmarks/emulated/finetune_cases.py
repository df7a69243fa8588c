"""Cases of fine-tuning: one description as options of the planner and as a script with peft's own calls."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from benchmarks.emulated.capabilities.case import Case
from benchmarks.emulated.jobs import DrawnJob

SCRIPT = "benchmarks/emulated/capabilities/scripts/finetune.py"
LLAMA: Mapping[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 16000,
}
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "amp-bf16": "float32"}


class Finetune(NamedTuple):
    """One job of fine-tuning, as both sides need it."""

    model: str = "LlamaForCausalLM"
    config: Mapping[str, Any] = LLAMA
    batch: int = 4
    tokens: int = 128
    gpu: str = "RTX 3090"
    precision: str = "bf16"
    checkpoint: bool = False
    peft: str = ""
    peft_arg: Mapping[str, Any] = {}
    quantize: str = ""
    quantize_arg: Mapping[str, Any] = {}
    prepare: bool = False
    script: Mapping[str, Any] = {}  # further entries of the script's description
    options: Mapping[str, Any] = {}  # further options of the planner


def finetune_case(number: int, job: Finetune) -> Case:
    """Return the case of a job."""
    options: dict[str, Any] = {
        "model_arg": dict(job.config),
        "input": f"{job.tokens}:int64",
        "precision": job.precision,
        "optimizer": "adamw",
        **({"checkpoint": "blocks"} if job.checkpoint else {}),
        **({"peft": job.peft, "peft_arg": texts_of(job.peft_arg)} if job.peft else {}),
        **({"quantize": job.quantize, "quantize_arg": texts_of(job.quantize_arg)} if job.quantize else {}),
        **({"prepare_kbit": True} if job.prepare else {}),
        **job.options,
    }
    described = {
        "model": job.model,
        "config": dict(job.config),
        "batch": job.batch,
        "tokens": job.tokens,
        "dtype": _DTYPES[job.precision],
        "autocast": job.precision.startswith("amp"),
        "checkpoint": job.checkpoint,
        "prepare": job.prepare,
        **({"peft": _peft(job)} if job.peft else {}),
        **({"quantize": _quantize(job)} if job.quantize and "-" not in job.quantize else {}),
        **({"torchao": {"kind": job.quantize, **job.quantize_arg}} if "-" in job.quantize else {}),
        **job.script,
    }
    drawn = DrawnJob(number, f"hf:{job.model}", job.batch, job.gpu, options)
    return Case(drawn, ("-P", SCRIPT, json.dumps(described)))


def texts_of(arguments: Mapping[str, Any]) -> list[str]:
    return [f"{name}={json.dumps(value)}" for name, value in arguments.items()]


def _peft(job: Finetune) -> dict[str, Any]:
    """Return the class of peft and its keywords."""
    variants = {"dora": ("lora", {"use_dora": True}), "rslora": ("lora", {"use_rslora": True})}
    method, preset = variants.get(job.peft, (job.peft, {}))
    return {"method": method, "task_type": "CAUSAL_LM", **preset, **job.peft_arg}


def _quantize(job: Finetune) -> dict[str, Any]:
    """Return the keywords of BitsAndBytesConfig."""
    if job.quantize == "int8":
        return {"load_in_8bit": True, **job.quantize_arg}
    computed = {"bnb_4bit_compute_dtype": _DTYPES[job.precision]}
    return {"load_in_4bit": True, "bnb_4bit_quant_type": job.quantize, **computed, **job.quantize_arg}
