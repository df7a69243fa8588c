"""Write the jobs that `run.py` measures on a GPU, with the peaks that the static planner predicts for them.

    python -m benchmarks.measured.jobs --cudnn FOLDER --torch 2.11.0 --gpu "H200 141GB" [--jobs 0-399]

Jobs are drawn as those of `benchmarks.emulated.differential` are, from another seed, and planned before they
are measured, so that nothing was tuned to them. FOLDER has the cuDNN that the measured torch runs with.
`CHOSEN` have negative numbers: models and batch sizes that people train on such a card. Numbers that have a
row are left out; processes with another --part may run at the same time.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.emulated.both_sides import plan_statically
from benchmarks.emulated.differential import numbers_of
from benchmarks.emulated.jobs import DrawnJob, draw_job, options_of
from benchmarks.emulated.rows import add_row
from benchmarks.rows import read_rows
from planner.api.request.request import make_job
from planner.errors import PlannerError
from planner.hardware.database import find_device
from planner.jobs import Job

SEED = 37
HERE = Path(__file__).parent
PLANNED = HERE / "h200" / "planned.csv"
_BF16 = {"optimizer": "adamw", "precision": "amp-bf16"}
_MOMENTUM = {"optimizer": "momentum"}
_LLAMA_1B = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}
CHOSEN: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("torchvision:resnet50", 256, _MOMENTUM),
    ("torchvision:resnet50", 512, {**_MOMENTUM, "precision": "amp-fp16", "memory_format": "channels_last"}),
    ("torchvision:resnet152", 128, {**_MOMENTUM, "precision": "amp-bf16"}),
    ("torchvision:vit_b_16", 128, _BF16),
    ("torchvision:vit_b_16", 64, {"optimizer": "adamw"}),
    ("torchvision:vit_l_16", 64, {**_BF16, "checkpoint": "blocks"}),
    ("torchvision:convnext_base", 64, _BF16),
    ("torchvision:swin_b", 64, _BF16),
    ("torchvision:efficientnet_v2_m", 64, _BF16),
    ("torchvision:vgg16_bn", 128, {"optimizer": "sgd"}),
    ("torchvision:densenet201", 64, _MOMENTUM),
    ("torchvision:deeplabv3_resnet101", 16, {"input": "3x513x513", "target": "513x513:int64", **_MOMENTUM}),
    ("monai:UNet", 4, {"input": "1x96x96x96", "target": "96x96x96:int64", **_BF16, "precision": "amp-fp16"}),
    ("hf:gpt2", 16, _BF16),
    ("hf:gpt2", 8, {"optimizer": "adamw"}),
    ("hf:bert", 32, _BF16),
    ("hf:t5", 16, _BF16),
    ("hf:LlamaForCausalLM", 4, {"model_arg": _LLAMA_1B, "optimizer": "adamw", "precision": "bf16"}),
    ("hf:LlamaForCausalLM", 8, {"model_arg": _LLAMA_1B, "checkpoint": "blocks", **_BF16}),
    ("hf:vit", 64, _BF16),
    ("timm:vit_base_patch16_224", 128, {**_BF16, "ema": True}),
)


@dataclass(frozen=True, slots=True)
class Planned:
    """A job and the prediction for it, in bytes."""

    number: int
    model: str
    batch: int
    options: str
    allocated: int
    reserved: int
    failure: str  # why it is not planned; "" if it is


def job_of(planned: Planned, cudnn: str = "", torch: str = "") -> Job:
    """Return the job of a row, with the cuDNN and the version of torch that it is planned for."""
    versions = {"cudnn": cudnn} if cudnn else {}
    versions |= {"torch": torch} if torch else {}
    job, _, _ = make_job(planned.model, {**options_of(planned.options), **versions})  # type: ignore[typeddict-item]
    return job


def main() -> None:
    """Plan the jobs without a row."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--cudnn", required=True, metavar="FOLDER", help="the libraries of cuDNN")
    parser.add_argument("--torch", required=True, metavar="VERSION", help="the version that is measured")
    parser.add_argument("--gpu", required=True, help="the GPU that is measured")
    parser.add_argument("--jobs", default="0-399", metavar="FIRST-LAST", help="numbers of drawn jobs")
    parser.add_argument("--chosen", action="store_true", help="plan the chosen jobs instead")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="each N-th job from the K-th")
    parser.add_argument("--to", type=Path, default=PLANNED, metavar="FILE")
    options = parser.parse_args()
    device, known = find_device(options.gpu), {row.number for row in read_rows(options.to, Planned)}
    part, parts = map(int, options.part.split("/"))
    jobs = [
        DrawnJob(-at, model, batch, "", given) for at, (model, batch, given) in enumerate(CHOSEN, start=1)
    ]
    if not options.chosen:
        jobs = [draw_job(SEED, number) for number in numbers_of(options.jobs)]
    for drawn in jobs[part - 1 :: parts]:
        if drawn.number in known:
            continue
        row = Planned(drawn.number, drawn.model, drawn.batch, drawn.words, 0, 0, "")
        try:
            side, _ = plan_statically(job_of(row, options.cudnn, options.torch), drawn.batch, device)
            figures = (side.allocated_bytes, side.reserved_bytes, side.failure)
        except PlannerError as error:
            figures = (0, 0, f"{type(error).__name__}: {error}")
        row = Planned(drawn.number, drawn.model, drawn.batch, drawn.words, *figures)
        add_row(options.to, row)
        print(row.number, row.model, row.reserved, row.failure[:150], flush=True)


if __name__ == "__main__":
    sys.exit(main())
