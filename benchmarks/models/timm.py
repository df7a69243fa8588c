"""Plan models of every family of timm on one card, training and inference.

    python -m benchmarks.models.timm [--models REGEX] [--to FOLDER]

From each module of timm the first and the last of its names, one for each eighth of them in between, so that
every family is there and large ones with more variants.
"""

from benchmarks.models.table import Entry, Table, run
from planner.capture.models.torchvision.shim import prepare_torchvision

NAMES_PER_MODEL = 8


def main() -> None:
    """Plan, print, write."""
    entries = [Entry(name, f"timm:{name}") for name in chosen_names()]
    about = (
        "Images of the size that the configuration of the model's weights names; training: SGD, cross "
        "entropy, or the sum of the features where a model has no head. Inference: eval mode, no gradients."
    )
    run(Table("timm", "Models of all families of timm, planned", about, entries, ["timm"]))


def chosen_names() -> list[str]:
    """Return evenly spaced names of each module's sorted list, each once."""
    prepare_torchvision()
    import timm

    chosen: dict[str, None] = {}
    for module in timm.list_modules():
        names = timm.list_models(module=module)
        count = min(len(names), 2 + len(names) // NAMES_PER_MODEL)
        chosen |= dict.fromkeys(names[i * (len(names) - 1) // max(count - 1, 1)] for i in range(count))
    return list(chosen)


if __name__ == "__main__":
    main()
