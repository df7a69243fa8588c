"""Writes docs/compare.md and its pictures: all estimators on models of the seed documents.

    python benchmarks/compare.py

Half a minute without a GPU. Needs the extra `plot`.
"""

from pathlib import Path

from planner.quick_api import compare
from planner.report.plots import draw_comparison

DOCS = Path(__file__).resolve().parents[1] / "docs"
MODELS = ("resnet50", "vit_b_16", "davenet_audio", "davenet_image")
BATCH = 128
HEAD = """\
# All estimators, side by side

Written by `benchmarks/compare.py`. One model: `planner compare --model resnet50 --batch 128 --plot FILE.png`.
MiB = 2**20 bytes, GiB = 2**30.

The notebook that measured ResNet-50 and ViT-B/16 ran one model after the other in one process, and each
stayed on the GPU with its gradients. Its "real" values hold these earlier models, its estimates do not: that
is why the closed formula looked better there than it is. The tables take this residue off, model by model,
and hold everything against what is left.

What makes the difference: which tensors are alive at the peak, and not how many there are in all; which
kernels run on CUDA (attention keeps no matrix, dropout one byte for each element); what cuBLAS takes; what
the caching allocator and the CUDA context hold beyond that. The formula and the three summaries know none of
it, MemTracker the first. The planner's last two rows, which decide whether a card is full, have no
counterpart in the others. `docs/formulas.md` tells what is wrong with each of them.
"""


def main() -> None:
    sections = [HEAD]
    for model in MODELS:
        result = compare(model, BATCH)
        name = f"compare_{model}.png"
        draw_comparison(result.comparison, DOCS / name)
        table = str(result).rpartition("\nTook ")[0]  # the seconds would differ each time
        sections.append(f"## {model}\n\n![All estimators on {model}]({name})\n\n```\n{table}\n```\n")
    (DOCS / "compare.md").write_text("\n".join(sections), encoding="utf-8")


if __name__ == "__main__":
    main()
