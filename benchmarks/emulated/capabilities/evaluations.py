"""Evaluations of a Trainer of transformers between its steps, with what they gather on the GPU.

The emulated side is the same script's `train()`. Both sides need transformers and accelerate.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.emulated.capabilities.case import Capability, Case
from benchmarks.emulated.jobs import DrawnJob

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


def _cases() -> Iterator[Case]:
    for number, (task, batch, gpu, given) in enumerate(_TRAINERS, start=1):
        job = DrawnJob(number, f"{SCRIPT}:{task}", batch, gpu, {"model_arg": dict(given)})
        command = ("-P", SCRIPT, json.dumps({"task": task, "batch": batch, **given}))
        yield Case(job, command, stop_after=1000)  # it ends by itself


CAPABILITY = Capability("a Trainer's, with what it gathers on the GPU", tuple(_cases()))
