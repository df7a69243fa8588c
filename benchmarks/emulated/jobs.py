"""Draw jobs at random, each from its own seed: models, recipes, batch sizes, GPUs.

Models are those that the tables under benchmarks plan for training, as far as they are small enough to be
built in seconds. Batch sizes stay below two fifths of the largest batch there, in proportion to the GPU.
"""

import re
from ast import literal_eval
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.rows import read_lines
from planner.hardware.database import find_device
from planner.hardware.device import MIB, Device

TABLES = Path(__file__).parents[1] / "models"
SOURCES: Mapping[str, tuple[str, ...]] = {
    "torchvision": ("torchvision", "torchvision_others"),
    "timm": ("timm",),
    "hf": ("transformers",),
    "monai": ("monai",),
    "smp": ("smp",),
}
TABLE_MIB = {"hf": 200_000}  # of the GPU that the table plans for; 24,000 for the others
GPUS = (
    *("T4", "RTX 2080 Ti", "RTX 3060", "RTX 3090", "A10", "A100 40GB", "RTX 4090", "L4"),
    *("H100 80GB", "RTX 5090"),
)
LARGEST_PARAMETERS = 60_000_000
LEAST_TABLE_BATCH = {
    "hf": 600,
    "torchvision": 40,
}  # tables without parameters: a larger model has a smaller one
LARGEST_BATCH = 96

# Models for images of any size.
_ANY_SIZE = re.compile(
    r"torchvision:(resnet|resnext|wide|vgg|densenet|mobilenet|efficientnet|convnext|regnet|shufflenet|mnasnet"
    r"|fcn|deeplab|lraspp)|timm:(\w*resnet|convnext|efficientnet|mobilenet|densenet|vgg|regnet|rexnet|dla)"
    r"|smp:(Unet|FPN|Linknet|MAnet|PSPNet|DeepLab)"
)
_SIZES = (128, 160, 192, 224, 256)
# Models whose repeated blocks `--checkpoint blocks` finds, or that have a switch of their own.
_WITH_BLOCKS = re.compile(
    r"torchvision:(resnet|vit|swin|convnext|regnet|mobilenet_v2|efficientnet)|hf:(bert|roberta|distilbert|gpt2"
    r"|electra|vit|deit|swin|opt)|timm:(vit|deit|swin|convnext|resnet|efficientnet|beit)"
)
_NOT_FUSED = ("rmsprop", "adafactor")


@dataclass(frozen=True, slots=True)
class DrawnJob:
    """One job as the keywords of `planner.estimate` name it."""

    number: int
    model: str
    batch: int
    gpu: str
    options: Mapping[str, Any]

    @property
    def words(self) -> str:
        """Return the job as options of the command line, without model, batch size and GPU."""
        words = []
        for name, value in self.options.items():
            option = "--" + name.replace("_", "-")
            if value is True:
                words.append(option)
            elif isinstance(value, Mapping):
                words += [f"{option} {key}={item}" for key, item in value.items()]
            else:
                words.append(f"{option} {value}")
        return " ".join(words)


def options_of(words: str) -> dict[str, Any]:
    """Return the options that `DrawnJob.words` writes as these words."""
    options: dict[str, Any] = {}
    for part in re.split("(?:^| )--(?=[a-z])", words)[1:]:
        option, _, text = part.partition(" ")
        name = option.replace("-", "_")
        if name.endswith("_arg") and not text.startswith("["):
            key, _, item = text.partition("=")
            options.setdefault(name, {})[key] = _value(item)
        elif name in ("input", "target") and not text.startswith("["):
            options[name] = text  # 32000 is a size, not a number
        else:
            options[name] = _value(text) if text else True
    return options


def _value(text: str) -> Any:
    try:
        return literal_eval(text)
    except (SyntaxError, ValueError):
        return text


# Identical to the byte on both sides, which `make emulated` holds; torchvision's alone, small ones.
FIXED = tuple(
    DrawnJob(-number, f"torchvision:{model}", batch, gpu, {"input": f"3x{size}x{size}", **options})
    for number, (model, batch, gpu, size, options) in enumerate(
        (
            ("resnet18", 16, "RTX 3090", 128, {"optimizer": "adamw", "precision": "amp-bf16"}),
            ("mobilenet_v2", 8, "T4", 96, {"optimizer": "momentum", "optimizer_impl": "fused"}),
            ("squeezenet1_1", 16, "RTX 3060", 96, {"optimizer": "rmsprop", "precision": "amp-fp16"}),
            ("shufflenet_v2_x0_5", 8, "RTX 4090", 96, {"accumulate": 2, "clip_gradients": "norm"}),
            ("vit_b_16", 2, "A100 40GB", 224, {"optimizer": "adafactor"}),
            ("regnet_y_400mf", 6, "L4", 128, {"checkpoint": "blocks", "zero_grad": "after-step"}),
            ("densenet121", 4, "RTX 2080 Ti", 96, {"optimizer": "adam", "precision": "amp-fp16"}),
        ),
        start=1,
    )
)


@dataclass(frozen=True, slots=True)
class _Entry:
    model: str
    model_arg: Mapping[str, Any]
    batch_per_mib: float


def draw_job(seed: int, number: int) -> DrawnJob:
    """Draw the job of this number. The same seed and number draw the same job, whatever else is drawn."""
    random = Random(f"{seed}/{number}")
    source = random.choice(tuple(SOURCES))
    entry = random.choice(read_entries(source))
    gpu = random.choice(GPUS)
    device = find_device(gpu)
    options: dict[str, Any] = {"model_arg": entry.model_arg} if entry.model_arg else {}
    options |= _draw_size(random, entry.model)
    options |= _draw_recipe(random, entry.model)
    return DrawnJob(number, entry.model, _draw_batch(random, entry, device), gpu, options)


def draw_cnn(seed: int, number: int) -> DrawnJob:
    """Draw a convolutional classifier in float32 with torch's defaults, at its own size."""
    random = Random(f"{seed}/cnn/{number}")
    entries = [one for source in ("torchvision", "timm") for one in read_entries(source)]
    entry = random.choice([one for one in entries if _CNN.match(one.model)])
    gpu = random.choice(GPUS)
    batch = _draw_batch(random, entry, find_device(gpu))
    return DrawnJob(number, entry.model, batch, gpu, {"optimizer": random.choice(("sgd", "adam"))})


_CNN = re.compile(
    "[a-z]+:(resnet|resnext|wide_resnet|seresnet|regnet|vgg|densenet|mobilenet|efficientnet|mnasnet|squeezenet"
    "|shufflenet|googlenet|inception|convnext|alexnet|dla|res2net|hrnet|rexnet|ghostnet|gernet|dpn|xception|nf_)"
)


def read_entries(source: str) -> list[_Entry]:
    """Read the models of a source that are trained in its tables and are not too large."""
    mib = TABLE_MIB.get(source, 24_000)
    entries = []
    for table in SOURCES[source]:
        rows = [
            row
            for row in read_lines(TABLES / f"{table}.csv")
            if row["mode"] == "train" and not row["failure"]
        ]
        for row in rows:
            batch = int(row["largest_batch"])
            if batch < LEAST_TABLE_BATCH.get(source, 2):
                continue
            if int(row.get("parameters") or 0) > LARGEST_PARAMETERS:
                continue
            name, _, encoder = row["model"].partition(" ")
            arguments = {"encoder_name": encoder} if encoder else {}
            entries.append(_Entry(f"{source}:{name}", arguments, batch / mib))
    return entries


def _draw_batch(random: Random, entry: _Entry, device: Device) -> int:
    most = 0.4 * entry.batch_per_mib * device.usable.value / MIB
    most = max(2.0, min(most, LARGEST_BATCH))
    return round(2 * (most / 2) ** random.random())  # batch norm over single elements takes no batch of 1


def _draw_size(random: Random, model: str) -> dict[str, Any]:
    """Draw the size of the input, for models without a fixed one."""
    if not _ANY_SIZE.match(model) or random.random() < 0.5:
        return {}
    size = random.choice(_SIZES)
    options: dict[str, Any] = {"input": f"3x{size}x{size}"}
    if model.startswith("smp:"):
        options["target"] = f"1x{size}x{size}"
    elif re.match(r"torchvision:(fcn|deeplab|lraspp)", model):
        options["target"] = f"{size}x{size}:int64"
    return options


def _draw_recipe(random: Random, model: str) -> dict[str, Any]:
    """Draw optimizer, precision, layout and the loop's options."""
    optimizers = ("sgd", "momentum", "nesterov", "adam", "adamw", "rmsprop", "adagrad", "adafactor")
    optimizer = random.choice(optimizers)
    options: dict[str, Any] = {"optimizer": optimizer}
    implementation = random.choices(("foreach", "fused", "for-loop"), (6, 3, 2))[0]
    if implementation == "fused" and optimizer in _NOT_FUSED:
        implementation = "foreach"
    if implementation != "foreach":
        options["optimizer_impl"] = implementation
    precision = random.choices(("fp32", "amp-fp16", "amp-bf16", "bf16"), (35, 20, 25, 20))[0]
    if precision != "fp32":
        options["precision"] = precision
    if not model.startswith("hf:") and random.random() < 0.3:
        options["memory_format"] = "channels_last"
    if _WITH_BLOCKS.match(model) and random.random() < 0.3:
        options["checkpoint"] = "blocks"
    if random.random() < 0.15:
        options["accumulate"] = random.choice((2, 3, 4))
    if random.random() < 0.15:
        options["clip_gradients"] = random.choice(("norm", "norm", "value"))
    if random.random() < 0.2:
        options["zero_grad"] = random.choice(("before-backward", "after-step"))
    for name, share in (("ema", 0.07), ("evaluate", 0.07), ("cudnn_benchmark", 0.04), ("keep_grads", 0.04)):
        if random.random() < share:
            options[name] = True
    return options
