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


def _cases() -> Iterator[Case]:
    jobs = [(model, 32, "RTX 3090", {}) for model in _MODELS]
    for number, (model, batch, gpu, options) in enumerate((*jobs, *_RECIPES), start=1):
        yield Case(DrawnJob(number, f"{_FILE}:{model}", batch, gpu, {**_INPUTS, **options}))


CAPABILITY = Capability("activations offloaded to the CPU", tuple(_cases()))
