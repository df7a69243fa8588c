"""Activations in memory of the CPU, pinned or not: save_on_cpu and hooks for saved tensors."""

from collections.abc import Iterator
from typing import Any

from benchmarks.emulated.capabilities.case import Capability, Case
from benchmarks.emulated.jobs import DrawnJob

_FILE = "benchmarks/emulated/capabilities/scripts/activation_memory.py"
_INPUTS: dict[str, Any] = {"input": "128x256", "target": "scalar:int64", "optimizer": "adamw"}
_MODELS = ("Offloading", "OffloadingPageable", "OffloadingInputs", "OffloadingHalf", "OffloadingLarge")
_RECIPES: tuple[tuple[str, int, str, dict[str, Any]], ...] = (
    ("Offloading", 64, "A100 80GB", {"precision": "amp-bf16"}),
    ("Offloading", 64, "RTX 3090", {"precision": "bf16"}),
    ("OffloadingInputs", 64, "H100", {"precision": "bf16"}),
    ("OffloadingLarge", 32, "RTX 3090", {"precision": "amp-fp16", "accumulate": 2}),
    ("OffloadingHalf", 32, "L4", {"precision": "bf16", "clip_gradients": "norm"}),
)
_GPT2: dict[str, Any] = {"input": "256:int64", "model_arg": ["n_layer=4"], "optimizer": "adamw"}
# By the planner's own loop: `--offload activations`.
_OPTIONS: tuple[tuple[str, int, str, dict[str, Any]], ...] = (
    ("torchvision:resnet50", 16, "RTX 3090", {"precision": "amp-bf16"}),
    ("torchvision:vit_b_16", 8, "A100 80GB", {"optimizer": "adamw", "accumulate": 2}),
    ("torchvision:convnext_tiny", 8, "L4", {"precision": "amp-fp16", "optimizer": "momentum"}),
    ("hf:gpt2", 8, "RTX 4090", {**_GPT2, "precision": "bf16"}),
    ("hf:gpt2", 4, "H100", {**_GPT2, "checkpoint": "blocks", "clip_gradients": "norm"}),
    ("timm:efficientnet_b0", 16, "T4", {"memory_format": "channels_last", "ema": True, "evaluate": True}),
)


def _cases() -> Iterator[Case]:
    jobs = [(model, 32, "RTX 3090", {}) for model in _MODELS]
    own = [
        (f"{_FILE}:{model}", batch, gpu, {**_INPUTS, **more})
        for model, batch, gpu, more in (*jobs, *_RECIPES)
    ]
    by_option = [
        (model, batch, gpu, {**more, "offload": "activations"}) for model, batch, gpu, more in _OPTIONS
    ]
    for number, case in enumerate((*own, *by_option), start=1):
        yield Case(DrawnJob(number, *case))


CAPABILITY = Capability("activations offloaded to the CPU", tuple(_cases()))
