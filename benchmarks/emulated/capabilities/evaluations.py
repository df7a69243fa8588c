"""Evaluations of a Trainer of transformers between its steps, with what they gather on the GPU.

The emulated side is the same script's `train()`. Both sides need transformers and accelerate.
"""

from collections.abc import Mapping
from typing import Any

from benchmarks.emulated.capabilities.case import Capability, cases_of_script

SCRIPT = "benchmarks/emulated/capabilities/scripts/evaluations.py"
_TRAINERS: tuple[tuple[str, int, str, Mapping[str, Any]], ...] = (
    ("tokens", 4, "RTX 3090", {"eval_samples": 256, "per_device_eval_batch_size": 16}),
    ("tokens", 4, "RTX 3090", {"eval_samples": 256, "eval_accumulation_steps": 4}),
    ("language", 4, "L4", {"eval_samples": 64, "bf16": True}),
    ("language", 4, "RTX 3090", {"eval_samples": 64, "metrics": False, "eval_tokens": 512}),
    ("language", 8, "A100 80GB", {"eval_samples": 48, "datasets": 2, "best": True}),
    ("images", 16, "RTX 3090", {"eval_samples": 512, "per_device_eval_batch_size": 64}),
    ("language", 4, "RTX 3090", {"eval_samples": 440, "eval_tokens": 64}),
    ("images", 16, "T4", {"eval_samples": 512, "fp16": True, "gradient_accumulation_steps": 2}),
)

CAPABILITY = Capability(
    "a Trainer's, with what it gathers on the GPU", cases_of_script(SCRIPT, "task", _TRAINERS)
)
