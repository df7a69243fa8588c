"""Plan models of transformers by their type on one card, training and inference.

    python -m benchmarks.models.transformers [--models REGEX] [--gpu-mib 200000] [--to PATH]

Each type has its default configuration, the head of its task and the inputs that follow from both, in fp32.
Prints each plan as it is made and writes PATH.md and PATH.csv (by default beside this file). A model that
cannot be planned is a row with its reason. With --models the other rows stay. Everything but
the seconds is the same in every run.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.models.table import listing, unknown_ops
from benchmarks.models.torchvision import (
    CONFIDENCE,
    HERE,
    MODES,
    Row,
    one_line,
    plan_model,
    table,
    totals,
    versions,
    with_earlier,
    write_csv,
)
from planner.allocator.config import AllocatorRules
from planner.capture.models.registry import import_transformers
from planner.hardware.budget import make_budget
from planner.hardware.device import generic_device
from planner.jobs import Mode

GPU_MIB = 200_000  # 7 billion parameters in fp32 with their gradients fit; most defaults are smaller by far
TYPES = (
    *("bert", "roberta", "distilbert", "albert", "electra", "deberta", "deberta-v2", "mpnet", "modernbert"),
    *("xlnet", "gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "codegen", "llama", "mistral", "qwen2"),
    *(
        "qwen3",
        "gemma",
        "gemma2",
        "phi",
        "phi3",
        "falcon",
        "stablelm",
        "olmo2",
        "granite",
        "mamba",
        "mixtral",
    ),
    *("qwen2_moe", "t5", "bart", "mbart", "pegasus", "blenderbot", "led", "vit", "deit", "beit", "swin"),
    *("swinv2", "convnext", "convnextv2", "dinov2", "resnet", "segformer", "mobilevit", "clip", "siglip"),
    *("wav2vec2", "hubert", "whisper", "audio-spectrogram-transformer"),
)


def main() -> None:
    """Plan, print, write."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument(
        "--models", default="", metavar="REGEX", help="only types that this matches; others stay"
    )
    parser.add_argument("--gpu-mib", type=int, default=GPU_MIB, metavar="N", help="total memory of the card")
    parser.add_argument("--to", type=Path, default=HERE / "transformers", metavar="PATH")
    options = parser.parse_args()
    names = [name for name in TYPES if re.search(options.models, name)]
    if not names:
        parser.error(f"--models {options.models}: no type's name matches")
    import_transformers()
    budget = make_budget(generic_device(options.gpu_mib), CONFIDENCE, AllocatorRules())
    plan_model("bert", Mode.TRAIN, budget, "hf")  # so that no row pays for what torch loads on first use
    rows = []
    for number, name in enumerate(names, start=1):
        print(f"{number}/{len(names)} {name}", file=sys.stderr, flush=True)
        for mode in MODES:
            rows.append(plan_model(name, mode, budget, "hf"))
            print(one_line(rows[-1]), flush=True)
    rows = with_earlier(rows, TYPES, options.to.with_suffix(".csv"))
    write_csv(rows, options.to.with_suffix(".csv"))
    options.to.with_suffix(".md").write_text(report(rows, options.gpu_mib))


def report(rows: Sequence[Row], gpu_mib: int) -> str:
    """The table as Markdown, with what stands out below it."""
    import transformers

    parts = [
        "# Models of transformers, planned",
        "Written by `python -m benchmarks.models.transformers`: the largest batch on a generic card of "
        f"{gpu_mib:,} MiB at confidence {CONFIDENCE}, three steps, fp32. Each type has its default "
        "configuration, the head of its task (`hf:TYPE`) and the inputs that follow: 128 tokens with a "
        "padded mask, the configuration's image, 10 s of sound. Training: SGD and the model's own loss. "
        f"Inference: eval mode, no gradients. transformers {transformers.__version__}, {versions()}",
        "The columns are those of torchvision.md. Seconds include the import of the model's module.",
        "\n".join(table(rows)),
        totals(rows),
        *listing("Not planned", (f"{r.model}, {r.mode}: {r.failure}" for r in rows if r.failure)),
        *listing("Traced anew", (f"{r.model}, {r.mode}: {r.not_affine}" for r in rows if r.not_affine)),
        *listing("Operators of unknown scratch memory, with the number of models", unknown_ops(rows)),
    ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
