"""Write docs/compare.md and its pictures: all estimators on models of the seed documents.

    python -m benchmarks.docs.compare

Half a minute without a GPU. Needs the extra `plot`.
"""

from pathlib import Path

from planner.api.compare import compare
from planner.report.plots.comparison import draw_comparison

DOCS = Path(__file__).resolve().parents[2] / "docs"
MODELS = ("resnet50", "vit_b_16", "davenet_audio", "davenet_image")
BATCH = 128
HEAD = """\
# All estimators, side by side

Written by `benchmarks/docs/compare.py`. One model: `planner compare --model resnet50 --batch 128 --plot
FILE.png`. MiB = 2**20 bytes, GiB = 2**30.

The notebook that measured ResNet-50 and ViT-B/16 trained one model after the other in one process, and each
stayed on the GPU with its gradients. Its "real" values contain these earlier models, its estimates do not,
which made the closed formula look better than it is. The tables subtract this residue, model by model, and
compare every estimator with the rest.

The estimators differ in which tensors they count as alive at the peak, in the kernels that CUDA runs
(attention stores no matrix, dropout one byte per element), in cuBLAS's workspaces, and in what the caching
allocator and the CUDA context hold beyond tensors. The formula and the three summaries model none of these,
MemTracker the first. The planner's last two rows, which decide whether a GPU is full, have no counterpart in
the others. The errors of each: [formulas.md](formulas.md).
"""


def main() -> None:
    sections = [HEAD]
    for model in MODELS:
        result = compare(model, BATCH)
        name = f"compare_{model}.png"
        draw_comparison(result.comparison, DOCS / name)
        table = str(result).rpartition("\nTook ")[0].rstrip()  # the seconds would differ each time
        sections.append(f"## {model}\n\n![All estimators on {model}]({name})\n\n```\n{table}\n```\n")
    (DOCS / "compare.md").write_text("\n".join(sections), encoding="utf-8")


if __name__ == "__main__":
    main()
