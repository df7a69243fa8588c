"""Plan every classification model of torchvision on one GPU, training and inference.

python -m benchmarks.models.torchvision [--models REGEX] [--to FOLDER]
"""

from benchmarks.models.table import Entry, Table, run
from planner.capture.models.torchvision.shim import prepare_torchvision

ABOUT = (
    "The models' usual images (224 x 224; Inception 299 x 299). Training: SGD, cross entropy. Inference: "
    "eval mode, no gradients."
)


def main() -> None:
    """Plan, print, write."""
    prepare_torchvision()
    from torchvision import models

    names = sorted(models.list_models(module=models))  # not those of its submodules for other tasks
    entries = [Entry(name, f"torchvision:{name}") for name in names]
    title = "Every classification model of torchvision, planned"
    run(Table("torchvision", title, ABOUT, entries, ["torchvision"]))


if __name__ == "__main__":
    main()
