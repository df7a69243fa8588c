"""Plan the networks of MONAI on one card, training and inference.

    python -m benchmarks.models.monai [--models REGEX] [--to FOLDER]

Every class of monai.networks.nets that is a module and every function that makes one, each once under its
own name.
"""

import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn

from benchmarks.models.table import Entry, Table, run
from planner.capture.models.torchvision.shim import prepare_torchvision
from planner.jobs.sample_inputs import find_sample

# Functions that make no network.
_HELPERS = (
    *("drop_connect", "get_efficientnet_image_size", "get_medicalnet_pretrained_resnet_args"),
    "get_pretrained_resnet_medicalnet",
)
_OBJECTS = "its constructor takes {}, which no --model-arg can say; build it in a FILE.py:NAME"
_SKIPPED = {
    **dict.fromkeys(
        ("BertAttention", "BertMixedLayer", "BertOutput", "MultiModal", "Pooler"),
        _OBJECTS.format("a configuration object of transformers"),
    ),
    "BertPreTrainedModel": "a base class without a forward method; name one that is derived from it",
    **dict.fromkeys(
        ("DiNTS", "NetAdapter", "VISTA3D"), _OBJECTS.format("modules")
    ),
    **dict.fromkeys(
        ("TopologyConstruction", "TopologyInstance", "TopologySearch"),
        "a part of DiNTS that takes a list of tensors; build the whole in a FILE.py:NAME",
    ),
    "Transchex": "downloads the configuration of BERT when it is built; a plan downloads nothing",
}  # fmt: skip


def main() -> None:
    """Plan, print, write."""
    entries = [Entry(name, f"monai:{name}", skipped=_SKIPPED.get(name, "")) for name in chosen_names()]
    about = (
        "Volumes of 96 voxels a side with one channel and two classes, and the arguments of "
        "planner/jobs/sample_inputs.py; training: SGD, cross entropy, or the sum of outputs of what is no "
        "classifier. "
        "Inference: eval mode, no gradients."
    )
    run(Table("monai", "Networks of MONAI, planned", about, entries, ["monai"]))


def chosen_names() -> list[str]:
    """Return one name for each network: the one with a default sample, else the network's own."""
    prepare_torchvision()
    from monai.networks import nets

    names: dict[int, str] = {}
    for name, network in _networks(nets):
        own = name == network.__name__
        if id(network) not in names or (own and find_sample(f"monai:{name}") is not None):
            names[id(network)] = name
    return sorted(names.values())


def _networks(nets: Any) -> Iterator[tuple[str, Any]]:
    for name, network in vars(nets).items():
        is_module = isinstance(network, type) and issubclass(network, nn.Module)
        if (is_module or inspect.isfunction(network)) and name not in _HELPERS and not name.startswith("_"):
            yield name, network


if __name__ == "__main__":
    main()
