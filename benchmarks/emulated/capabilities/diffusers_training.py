"""ControlNets and adapters trained with diffusers, each script planned by the name of its step."""

import json
from typing import Any

from benchmarks.emulated.capabilities.case import Capability, Case
from benchmarks.emulated.jobs import DrawnJob

_FILES = "benchmarks/emulated/capabilities/diffusers_files"
_IMAGES = ("pixel_values=3x256x256", "conditioning_pixel_values=3x256x256", "input_ids=77:int64")
_CACHED = ("latents=4x32x32", *_IMAGES[1:])
_STATES = "states=77x256"
_LATENTS = {"sd3": "latents=16x32x32", "flux": "latents=256x64"}

_CONTROLNETS: tuple[tuple[int, str, bool, dict[str, Any]], ...] = (
    (4, "RTX 3090", False, {"eight_bit": True}),
    (4, "A100 40GB", True, {"precision": "bf16"}),
    (2, "T4", False, {"checkpointing": False}),
    (4, "RTX 4090", True, {"precision": "no", "checkpointing": False}),
    (3, "L4", False, {"precision": "bf16", "sdxl": True, "eight_bit": True}),
    (6, "RTX 5090", True, {"precision": "bf16", "sdxl": True, "accumulate": 2}),
)
_LORAS: tuple[tuple[int, str, dict[str, Any]], ...] = (
    (4, "RTX 3060", {}),
    (8, "RTX 3090", {"precision": "bf16", "rank": 64, "checkpointing": True, "ema": True}),
    (2, "T4", {"kind": "sdxl", "rank": 16, "eight_bit": True}),
    (4, "A10", {"kind": "sdxl", "precision": "no", "rank": 8}),
    (4, "RTX 4090", {"kind": "sd3", "precision": "bf16", "rank": 16}),
    (3, "H100 80GB", {"kind": "flux", "precision": "bf16", "rank": 16, "checkpointing": True}),
    (2, "A100 40GB", {"kind": "flux", "precision": "bf16", "eight_bit": True, "ema": True}),
)


def _case(
    number: int, step: str, batch: int, gpu: str, inputs: tuple[str, ...], options: dict[str, Any], *more: str
) -> Case:
    file = f"{_FILES}/{step.partition(':')[0]}"
    job = DrawnJob(number, f"{_FILES}/{step}", batch, gpu, {"input": list(inputs), "model_arg": options})
    command = (file, "--batch-size", str(batch), "--options", json.dumps(options), *more)
    return Case(job, command, stop_after=1000)


def _cases() -> list[Case]:
    cases = []
    for batch, gpu, is_cached, options in _CONTROLNETS:
        inputs, more = (_CACHED, ("--cached",)) if is_cached else (_IMAGES, ())
        step = "controlnet.py:ControlNetTraining"
        cases.append(_case(len(cases) + 1, step, batch, gpu, inputs, options, *more))
    for batch, gpu, options in _LORAS:
        inputs = (_LATENTS.get(options.get("kind", ""), "latents=4x32x32"), _STATES)
        cases.append(_case(len(cases) + 1, "lora.py:LoraTraining", batch, gpu, inputs, options))
    return cases


CAPABILITY = Capability(
    "ControlNets beside frozen models and LoRA of peft, as scripts with diffusers train them",
    tuple(_cases()),
)
