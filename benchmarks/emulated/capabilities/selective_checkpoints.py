"""Selective checkpoints: policies of torch.utils.checkpoint, every second block, budgets of torch.compile."""

from collections.abc import Iterator
from typing import Any

from benchmarks.emulated.capabilities.case import Capability, Case
from benchmarks.emulated.jobs import DrawnJob

_FILE = "benchmarks/emulated/capabilities/scripts/activation_memory.py"
_BUDGET_FILE = "benchmarks/emulated/capabilities/scripts/activation_budget.py"
_INPUTS: dict[str, Any] = {"input": "128x256", "target": "scalar:int64", "optimizer": "adamw"}
_MODELS = ("EverySecond", "Reentrant", "Saving", "SavingAttention", "SavingBoth", "SavingList", "SavingHalf")
_RECIPES: tuple[tuple[str, int, str, dict[str, Any]], ...] = (
    ("SavingBoth", 64, "A100 80GB", {"precision": "amp-bf16"}),
    ("SavingHalf", 64, "RTX 3090", {"precision": "bf16"}),
    ("Saving", 64, "H100", {"precision": "bf16"}),
    ("SavingBoth", 32, "RTX 3090", {"precision": "amp-fp16", "accumulate": 2}),
    ("SavingList", 32, "L4", {"precision": "bf16", "clip_gradients": "norm"}),
)
_BUDGETS = ("Half", "Tight", "Least", "All")  # of torch.compile


def _cases() -> Iterator[Case]:
    jobs = [(model, 32, "RTX 3090", {}) for model in _MODELS]
    for number, (model, batch, gpu, options) in enumerate((*jobs, *_RECIPES), start=1):
        yield Case(DrawnJob(number, f"{_FILE}:{model}", batch, gpu, {**_INPUTS, **options}))
    for number, model in enumerate(_BUDGETS, start=len(jobs) + len(_RECIPES) + 1):
        options = {**_INPUTS, "compile": "default"}
        yield Case(DrawnJob(number, f"{_BUDGET_FILE}:{model}", 32, "RTX 3090", options))


CAPABILITY = Capability(
    "selective checkpoints in a model's own forward, and budgets of compiled models", tuple(_cases())
)
