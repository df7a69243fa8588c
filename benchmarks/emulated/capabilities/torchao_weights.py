"""Weights of torchao in a step of one's own, whose script runs on the emulated side, and by `--quantize`."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.emulated.capabilities.case import Capability, Case
from benchmarks.emulated.finetune_cases import LLAMA, Finetune, finetune_case
from benchmarks.emulated.jobs import DrawnJob

SCRIPT = "benchmarks/emulated/capabilities/scripts/torchao_weights.py"
_JOBS: tuple[tuple[int, int, str, Mapping[str, Any]], ...] = (
    (4, 128, "RTX 3090", {"weights": "int8", "lora": True}),
    (4, 128, "RTX 3090", {"weights": "int8", "lora": True, "place": "gpu"}),
    (16, 256, "A100 80GB", {"weights": "int8", "lora": True, "place": "each", "checkpoints": True}),
    (8, 128, "RTX 3090", {"weights": "int8-groups", "trains": False, "place": "gpu"}),
    (8, 128, "RTX 3090", {"weights": "int8-dynamic", "trains": False, "place": "gpu"}),
    (8, 128, "RTX 3090", {"weights": "int4", "trains": False, "place": "gpu"}),
    (4, 128, "RTX 3090", {"weights": "int8-training", "optimizer": "Adam"}),
    (8, 128, "A100 80GB", {"weights": "int8-training", "optimizer": "SGD", "place": "gpu"}),
    (4, 128, "RTX 3090", {"weights": "int8-mixed"}),
    (4, 128, "RTX 3090", {"weights": "nf4"}),
    (8, 256, "A100 80GB", {"weights": "nf4", "place": "gpu", "checkpoints": True}),
    (4, 128, "H100", {"weights": "float8-training"}),
    (4, 128, "RTX 4090", {"weights": "float8-training", "place": "gpu"}),
    (4, 128, "H100", {"weights": "float8-training", "rows": True}),
    (4, 128, "RTX 4090", {"weights": "float8", "lora": True}),
)


_LORA: Mapping[str, Any] = {"peft": "lora", "peft_arg": {"r": 16, "target_modules": "all-linear"}}
_ADAM: Mapping[str, Any] = {"script": {"optimizer": "Adam"}, "options": {"optimizer": "adam"}}
_OPTIONS = (
    Finetune(quantize="int8-weight-only", **_LORA),
    Finetune(quantize="int8-weight-only", batch=8, tokens=256, gpu="A100 80GB", checkpoint=True, **_LORA),
    Finetune("Qwen2ForCausalLM", LLAMA, quantize="int8-weight-only", gpu="L4", batch=1, **_LORA),
    Finetune(quantize="int8-training", **_ADAM),
    Finetune(quantize="int8-mixed"),
    Finetune(quantize="float8-training", gpu="H100"),
    Finetune(quantize="float8-training", gpu="H100", quantize_arg={"recipe_name": "rowwise"}),
)


def _cases() -> Iterator[Case]:
    """Yield steps of one's own, then jobs with `--quantize`."""
    for number, job in enumerate(_OPTIONS, start=len(_JOBS) + 1):
        yield finetune_case(number, job)
    for number, (batch, tokens, gpu, given) in enumerate(_JOBS, start=1):
        job = DrawnJob(
            number, f"{SCRIPT}:Training", batch, gpu, {"input": f"{tokens}:int64", "model_arg": dict(given)}
        )
        yield Case(job, (SCRIPT, json.dumps({"batch": batch, "tokens": tokens, **given})), stop_after=1000)


CAPABILITY = Capability(
    "weights of torchao: INT8, INT4, NF4, FP8 and training in them; the script says that no texts are packed",
    tuple(sorted(_cases(), key=lambda case: case.job.number)),
)
