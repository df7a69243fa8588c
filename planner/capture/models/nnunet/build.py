"""Build the network and loss of a configuration in nnU-Net's plans.

The plans are in nnUNetPlans.json. The model is named `nnunet:PLANS.json` with `--model-arg
configuration=3d_fullres`. The plans name a network of dynamic-network-architectures. `patch_size` may differ
from the plans' patch, and with `replan` the network is the one that nnU-Net's planner chooses for that patch.
The module returns the loss of nnUNetTrainer with deep supervision: soft Dice of the foreground and cross
entropy, at every scale except the smallest. Channels and classes come from the dataset.json in the folder of
the plans, or from `input_channels` and `num_classes`.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.capture.models.libraries import import_library, read_json
from planner.capture.models.nnunet.topology import (
    Topology,
    plan_topology,
    planned_topologies,
    with_topology,
)
from planner.errors import ModelError, UsageError
from planner.jobs import Compile, Job, Loss, Mode, TensorSpec, nearest, split_model

SOURCE = "nnunet"
_LIBRARY = "dynamic_network_architectures"
_ARGUMENTS = ("configuration", "patch_size", "replan", "input_channels", "num_classes", "batch_dice")


class Configuration:
    """A configuration of nnU-Net's plans: its network, patch, channels and classes."""

    def __init__(self, file: str, arguments: Mapping[str, Any]) -> None:
        """Read the plans file and the dataset.json in its folder.

        The dataset.json may be missing. Raises UsageError for an unknown argument, file or configuration;
        ModelError for plans without an architecture.
        """
        for key in arguments:
            if key not in _ARGUMENTS:
                raise UsageError(f"--model-arg {key}: plans take {', '.join(_ARGUMENTS)}")
        path = Path(file)
        configurations = _read(path).get("configurations", {})
        name = arguments.get("configuration", "3d_fullres")
        if name not in configurations:
            near = nearest(str(name), configurations) or ", ".join(configurations)
            raise UsageError(f"--model-arg configuration={name}: {path} has none of this name; it has {near}")
        values = _inherited(configurations, name)
        if "architecture" not in values or "patch_size" not in values:
            raise ModelError(
                f"{path}: configuration {name} names no architecture, as plans of nnU-Net before 2.4; plan "
                "the experiment again with a newer version"
            )
        dataset = path.with_name("dataset.json")
        about = _read(dataset) if dataset.exists() else {}
        labels = [key for key in about.get("labels", {}) if key != "ignore"]
        self.file = file
        self.values = values
        self.network = values["architecture"]
        self.patch = tuple(arguments.get("patch_size") or values["patch_size"])
        if arguments.get("replan"):
            topology = plan_topology(self.spacing(), self.patch)
            self.network, self.patch = with_topology(self.network, topology), topology.patch
        self.channels = int(arguments.get("input_channels") or len(about.get("channel_names", {})) or 1)
        self.classes = int(arguments.get("num_classes") or len(labels) or 2)
        self.batch_dice = bool(arguments.get("batch_dice", values.get("batch_dice", False)))

    def spacing(self) -> tuple[float, ...]:
        """Return the voxel spacing of the images. Raises ModelError if the plans name no spacing."""
        return self._numbers("spacing")

    def topologies(self) -> Iterator[Topology]:
        """Yield the topologies that nnU-Net's planner would try, largest patch first."""
        return planned_topologies(self.spacing(), self._numbers("median_image_size_in_voxels"))

    def _numbers(self, key: str) -> tuple[float, ...]:
        given = self.values.get(key)
        axes = len(self.values["patch_size"])
        if not isinstance(given, list) or len(given) < axes or not all(one > 0 for one in given[:axes]):
            raise ModelError(
                f"{self.file}: the configuration has no {key}, which decides the network of a patch"
            )
        return tuple(given[:axes])

    def target_sizes(self) -> list[tuple[int, ...]]:
        """Return the target's size at each scale of deep supervision. The first size is the patch size."""
        strides = self.network["arch_kwargs"]["strides"]
        sizes, size = [], self.patch
        for stride in strides[:-1]:
            steps = (stride,) * len(size) if isinstance(stride, int) else stride
            size = tuple(-(-one // step) for one, step in zip(size, steps, strict=True))
            sizes.append(size)
        return sizes


def find_nnunet(file: str) -> Callable[..., nn.Module]:
    """Return a function that builds the network and loss of a plans file."""
    import_library(_LIBRARY, extra="")
    return partial(build, file)


def build(file: str, **arguments: Any) -> nn.Module:
    """Return a module with a configuration's network and nnU-Net's loss."""
    configuration = Configuration(file, arguments)
    architecture = configuration.network
    given = dict(architecture["arch_kwargs"])
    for key in architecture.get("_kw_requires_import", ()):
        given[key] = None if given[key] is None else _imported(file, given[key], "torch.nn")
    network_class = _imported(file, architecture["network_class_name"], _LIBRARY)
    network = network_class(
        input_channels=configuration.channels,
        num_classes=configuration.classes,
        deep_supervision=True,
        **given,
    )
    return Trained(network, configuration.batch_dice)


def complete_nnunet(job: Job, file: str, arguments: Mapping[str, Any]) -> Job:
    """Return the job with a patch as input, and the patch's segmentations if it trains on the model's loss.

    Raises UsageError if the job is compiled, or names other inputs.
    """
    if job.model.compile is not Compile.NONE:
        raise UsageError(
            f"{job.model.name}: --compile: nnU-Net compiles its network without the loss, which is not "
            "planned; remove it, and set nnUNet_compile=f for the same run"
        )
    configuration = Configuration(file, arguments)
    inputs = [TensorSpec((configuration.channels, *configuration.patch), keyword="data")]
    if job.loop.mode is Mode.TRAIN and job.loop.loss is Loss.OUTPUT:
        inputs += [
            TensorSpec((1, *size), "int16", f"target[{place}]")
            for place, size in enumerate(configuration.target_sizes())
        ]
    if job.samples.inputs not in ((), tuple(inputs)):
        raise UsageError(
            f"{job.model.name}: --input: the plans decide it; give --model-arg patch_size=[D, H, W]"
        )
    return job.replace(inputs=tuple(inputs))


def planned_patches(job: Job) -> tuple[tuple[int, ...], ...]:
    """Return the patch sizes that nnU-Net's planner would try, smallest first.

    The patches are for the job's configuration. Patches with fewer than two stages are left out, since they
    have no network. Raises ModelError for plans without the spacing or the median shape of the images.
    """
    _, file = split_model(job.model.origin)
    topologies = Configuration(file, dict(job.model.args)).topologies()
    patches = [each.patch for each in topologies if len(each.strides) > 1]
    return tuple(reversed(patches))


class Trained(nn.Module):
    """A network with the loss of nnUNetTrainer. Without targets it returns the network's output."""

    def __init__(self, network: nn.Module, batch_dice: bool) -> None:
        super().__init__()
        self.network = network
        self.batch_dice = batch_dice

    def forward(self, data: Tensor, target: Sequence[Tensor] = ()) -> Any:
        """Return the loss, or the network's output if no target is given.

        The loss covers all scales except the smallest. The weight halves from each scale to the next.
        """
        decoder = getattr(self.network, "decoder", None)
        if not self.training and decoder is not None:
            decoder.deep_supervision = bool(target)  # off for inference (nnUNetPredictor)
        output = self.network(data)
        if not target:
            return output
        weights = [0.5**place for place in range(len(target) - 1)] or [1.0]
        return sum(
            weight / sum(weights) * self._loss(scores, truth)
            for weight, scores, truth in zip(weights, output, target, strict=False)
        )

    def _loss(self, scores: Tensor, truth: Tensor) -> Tensor:
        """Return the soft Dice loss plus the cross entropy.

        Sources: nnunetv2/training/loss/compound_losses.py and dice.py.
        """
        dice = self._dice(scores, truth)
        return dice + F.cross_entropy(scores, truth[:, 0].long())

    def _dice(self, scores: Tensor, truth: Tensor) -> Tensor:
        shares = scores.softmax(1)
        space = tuple(range(2, shares.dim()))
        with torch.no_grad():
            hot = torch.zeros(shares.shape, device=shares.device, dtype=torch.bool)
            hot.scatter_(1, truth.long(), 1)
            hot = hot[:, 1:]
            of_truth = hot.sum(space)
        shares = shares[:, 1:]
        both, of_shares = (shares * hot).sum(space), shares.sum(space)
        if self.batch_dice:
            both, of_shares, of_truth = both.sum(0), of_shares.sum(0), of_truth.sum(0)
        ratio = (2 * both + 1e-5) / torch.clip(of_truth + of_shares + 1e-5, 1e-8)
        return -ratio.mean()


def _read(path: Path) -> dict[str, Any]:
    values = read_json(path, "the plans of nnU-Net")
    if not isinstance(values, dict):
        raise ModelError(f"{path}: is no JSON object; mend the file")
    return values


def _inherited(configurations: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a configuration's values, completed by the values that it inherits from its parent."""
    values = dict(configurations[name])
    parent = values.get("inherits_from")
    return values if parent is None else _inherited(configurations, parent) | values


def _imported(file: str, name: str, package: str) -> Any:
    """Import and return the object with the dotted name `name`.

    Raises ModelError for a name that is not in `package` or does not exist; `file` is for messages.
    """
    module, _, attribute = name.rpartition(".")
    if not f"{module}.".startswith(f"{package}."):
        raise ModelError(f"{file}: {name} is not of {package}, and code from elsewhere is not run")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ModelError(f"{file}: {name} does not exist in the installed version") from error
