"""Batches of samples of many sizes: 60 steps over the same sampled batches on both sides."""

from typing import Any

from benchmarks.emulated.capabilities.case import Capability, Case
from benchmarks.emulated.jobs import DrawnJob

STEPS = 60
_SCRIPT = "benchmarks/emulated/capabilities/scripts/varying_shapes.py"
_EXPANDABLE = "expandable_segments:True"


def _texts(low: int, high: int, **options: Any) -> dict[str, Any]:
    return {"input": f"input_ids={low}..{high}:int64", "optimizer": "adamw"} | options


def _images(low: int, high: int, **options: Any) -> dict[str, Any]:
    sample = {"input": f"3x{low}..{high}x{low}..{high}", "target": "scalar:int64"}
    return sample | {"optimizer": "sgd", "batching": "scaled", "pad_to": 32} | options


def _rectangles(low: int, high: int, narrow: int, wide: int) -> dict[str, Any]:
    sample = {"input": f"3x{low}..{high}x{narrow}..{wide}", "target": "scalar:int64"}
    return sample | {"optimizer": "sgd", "batching": "scaled", "pad_to": 32}


# Model, options, batch size or tokens of a batch, configuration of the allocator, its cap in MiB.
_JOBS: tuple[tuple[str, dict[str, Any], int, str, int], ...] = (
    ("hf:gpt2", _texts(16, 512), 4, "", 0),
    ("hf:bert", _texts(8, 512), 8, "", 0),
    ("hf:t5", _texts(16, 256), 4, "", 0),
    ("torchvision:resnet50", _images(224, 512), 8, "", 0),
    ("hf:bert", _texts(8, 512, precision="amp-bf16", batching="scaled"), 8, _EXPANDABLE, 0),
    ("hf:gpt2", _texts(16, 1024, precision="amp-bf16", batching="scaled", pad_to=8), 3, "", 0),
    ("torchvision:resnet18", _images(128, 320, precision="amp-fp16"), 32, _EXPANDABLE, 0),
    (
        "hf:bert",
        _texts(8, 384, optimizer="sgd", precision="amp-fp16", batching="grouped", pad_to=8),
        6,
        "",
        0,
    ),
    ("hf:t5", _texts(16, 256, precision="amp-bf16", batching="tokens"), 2048, _EXPANDABLE, 0),
    ("hf:gpt2", _texts(32, 768, optimizer="sgd", batching="tokens"), 3000, "", 0),
    ("hf:gpt2", _texts(16, 512, batching="scaled"), 4, "", 8000),
    ("hf:bert", _texts(8, 512), 8, "", 5900),
    ("hf:gpt2", _texts(16, 512, batching="packed"), 4, "", 0),
    ("hf:bert", _texts(8, 384, precision="amp-bf16", batching="packed"), 8, _EXPANDABLE, 0),
    ("torchvision:resnet18", _rectangles(128, 256, 192, 320), 16, "", 0),
)


def _case(number: int, model: str, options: dict[str, Any], batch: int, config: str, cap_mib: int) -> Case:
    job = DrawnJob(number, model, batch, "RTX 3090", {**options, "run_steps": STEPS})
    return Case(job, (_SCRIPT, config, str(cap_mib)), STEPS)


CAPABILITY = Capability(
    "samples of many sizes, 60 sampled batches (`--input 16..512:int64`)",
    tuple(_case(number, *job) for number, job in enumerate(_JOBS, start=1)),
)
