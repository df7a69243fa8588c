"""The options of the commands, in groups that commands share, and how a command takes them.

Every option arrives as a text and stays one until a command runs, so that all refusals read alike.
"""

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any

from planner.cli.declared import (
    AllocatorCap,
    AllocConf,
    Catalogue,
    Confidence,
    GpuMib,
    Isolate,
    TimeLimit,
)
from planner.cli.folders import cache_folder, folder_to_read
from planner.cli.words import Option
from planner.errors import UsageError
from planner.jobs import shown

Action = Callable[[], int]  # a parsed command, ready to run; gives the exit code
Text = str | None
# Options that are whole numbers, each with a value that a complaint may name.
_EXAMPLES: Mapping[str, str] = MappingProxyType(
    {
        "steps": "3",
        "accumulate": "4",
        "new_tokens": "128",
        "eval_batch": "64",
        "dataset_size": "50000",
        "gpu_mib": "24000",
        "allocator_cap_mib": "8000",
    }
)


@dataclass(frozen=True, slots=True)
class JobOptions:
    """What is to be run."""

    model: Annotated[
        Text,
        Option(
            metavar="NAME",
            help="A name of models.yaml, SOURCE:NAME (torchvision, timm, hf, monai, smp), or FILE.py:NAME.",
        ),
    ] = None
    model_arg: Annotated[
        list[str] | None,
        Option(metavar="KEY=VALUE", help="An argument of the model's constructor; repeatable."),
    ] = None
    input: Annotated[
        list[str] | None,
        Option(
            metavar="SHAPE[:DTYPE]",
            help="One sample of an input, without the batch dimension: 3x224x224, ids=128:int64, "
            "batch.image=3x224x224 for an entry of a dict; repeatable.",
        ),
    ] = None
    target: Annotated[
        list[str] | None,
        Option(
            metavar="SHAPE[:DTYPE]",
            help="One sample of the target, such as 10 or scalar:int64; with names and --loss FILE.py:NAME "
            "repeatable.",
        ),
    ] = None
    loss: Annotated[
        Text,
        Option(
            metavar="NAME",
            help="cross_entropy, mse, bce_with_logits, sum, output: the model's own, or FILE.py:NAME.",
        ),
    ] = None
    mode: Annotated[
        Text,
        Option(metavar="MODE", help="train, infer, generate, or forward: train without a backward pass."),
    ] = None
    optimizer: Annotated[
        Text,
        Option(metavar="NAME", help="sgd, momentum, nesterov, adam, adamw, rmsprop, adagrad or adafactor."),
    ] = None
    optimizer_impl: Annotated[
        Text, Option(metavar="NAME", help="foreach (the default, as on CUDA), for-loop or fused.")
    ] = None
    zero_grad: Annotated[
        Text, Option(metavar="WHEN", help="before-forward (the default), before-backward or after-step.")
    ] = None
    keep_grads: Annotated[
        bool, Option("--keep-grads", help="Plan for zero_grad(set_to_none=False): gradients stay allocated.")
    ] = False
    steps: Annotated[Text, Option(metavar="N", help="Number of traced steps; 3 by default.")] = None
    precision: Annotated[
        Text, Option(metavar="NAME", help="fp32 (the default), amp-fp16, amp-bf16, or pure fp16 or bf16.")
    ] = None
    grad_scaler: Annotated[
        bool | None,
        Option("--grad-scaler/--no-grad-scaler", help="Scale the loss; by default with amp-fp16 only."),
    ] = None
    backward_in_autocast: Annotated[
        bool, Option("--backward-in-autocast", help="Run the backward pass inside the autocast region too.")
    ] = False
    memory_format: Annotated[
        Text, Option(metavar="NAME", help="contiguous (the default) or channels_last.")
    ] = None
    checkpoint: Annotated[
        Text,
        Option(
            metavar="WHAT",
            help="none (the default), or blocks: recompute repeated blocks in the backward pass.",
        ),
    ] = None
    accumulate: Annotated[
        Text, Option(metavar="N", help="Micro-batches per optimizer step, each of the batch size.")
    ] = None
    clip_gradients: Annotated[Text, Option(metavar="HOW", help="none (the default), norm or value.")] = None
    ema: Annotated[bool, Option("--ema", help="Keep a moving average of the weights on the GPU.")] = False
    evaluate: Annotated[
        bool,
        Option("--evaluate", help="Evaluate without gradients between the steps, with the same batch size."),
    ] = False
    eval_batch: Annotated[
        Text, Option(metavar="N", help="Batch size of the evaluation; implies --evaluate.")
    ] = None
    dataset_size: Annotated[
        Text,
        Option(metavar="N", help="Samples per epoch; the last batch may be smaller."),
    ] = None
    lengths: Annotated[
        Text,
        Option(
            metavar="WHICH",
            help="Sizes of real samples: fixed, or varying: padded to the longest of their batch. Decides "
            "margins alone; by default varying for token ids.",
        ),
    ] = None
    ddp: Annotated[bool, Option("--ddp", help="Train with DistributedDataParallel's gradient buckets.")] = (
        False
    )
    ddp_bucket_view: Annotated[
        bool, Option("--ddp-bucket-view", help="DDP with gradient_as_bucket_view=True; implies --ddp.")
    ] = False
    freeze: Annotated[
        list[str] | None,
        Option(metavar="PATTERN", help="Parameters that are not trained, such as 'backbone.*'; repeatable."),
    ] = None
    train_only: Annotated[
        list[str] | None,
        Option(metavar="PATTERN", help="Train only these parameters, such as '*lora*'; repeatable."),
    ] = None
    new_tokens: Annotated[
        Text, Option(metavar="N", help="Tokens that --mode generate adds to the prompt, which is --input.")
    ] = None
    cudnn_benchmark: Annotated[
        bool, Option("--cudnn-benchmark", help="Plan for torch.backends.cudnn.benchmark = True.")
    ] = False
    cudnn: Annotated[
        Text,
        Option(
            metavar="WHICH",
            help="Source of convolution workspaces: published (the default: fitted to published runs), "
            "installed (the installed cuDNN, 9.8 or newer), or the folder of a libcudnn.so.9. Needs no GPU.",
        ),
    ] = None
    cublas_workspace_config: Annotated[
        Text, Option(metavar="TEXT", help="Value of CUBLAS_WORKSPACE_CONFIG, such as :4096:8, :16:8 or :0:0.")
    ] = None
    models: Catalogue = None
    allow_code: Annotated[
        bool, Option("--allow-code", help="Allow FILE.py:NAME, which runs code, in the file of --models.")
    ] = False
    isolate: Isolate = False
    time_limit: TimeLimit = None
    trace: Annotated[
        Text, Option(metavar="FILE", help="Plan from a saved trace instead of a model, without torch.")
    ] = None
    save_trace: Annotated[
        Text, Option(metavar="FILE", help="Save the trace for --trace or a bug report.")
    ] = None
    no_cache: Annotated[
        bool, Option("--no-cache", help="Neither read nor write cached traces (see planner cache).")
    ] = False

    def keywords(self) -> dict[str, Any]:
        """As the functions of `planner.api` take them."""
        given = values_of(self)
        del given["no_cache"]
        return given | {"cache": None if self.no_cache else cache_folder(), "warn": warn}


@dataclass(frozen=True, slots=True)
class CardOptions:
    """What bounds the memory."""

    gpu: Annotated[Text, Option(metavar="NAME", help="A GPU such as 'RTX 4090' or L4.")] = None
    gpu_mib: GpuMib = None
    allocator_cap_mib: AllocatorCap = None
    alloc_conf: AllocConf = None
    confidence: Confidence = None

    def keywords(self) -> dict[str, Any]:
        """As the functions of `planner.api` take them."""
        return values_of(self)


@dataclass(frozen=True, slots=True)
class MethodOptions:
    """How it is estimated."""

    method: Annotated[
        Text,
        Option(
            metavar="NAME",
            help="trace or formula; estimate also knows torchinfo, torchsummary, modelsize and memtracker.",
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class FolderOptions:
    """Where stored calibrations are looked for besides the user's own folder and the package."""

    calibrations: Annotated[
        list[str] | None,
        Option(metavar="DIR", help="A folder of calibrations to search first; repeatable."),
    ] = None


@dataclass(frozen=True, slots=True)
class CalibrationOptions(FolderOptions):
    """Which stored calibrations may answer."""

    no_calibration: Annotated[bool, Option("--no-calibration", help="Plan without stored calibrations.")] = (
        False
    )

    def keywords(self) -> dict[str, Any]:
        """As the functions of `planner.api` take them."""
        if self.no_calibration and self.calibrations:
            raise UsageError("--calibrations and --no-calibration: one asks for what the other forbids")
        return {
            "calibrations": self.calibrations,
            "own_calibrations": folder_to_read(),
            "no_calibration": self.no_calibration,
        }


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """How the answer is shown."""

    json: Annotated[bool, Option("--json", help="Print one JSON object instead of the report.")] = False
    debug: Annotated[bool, Option("--debug", help="Show the traceback of an error.")] = False


def takes(*groups: type[Any]) -> Callable[[Callable[..., int]], Callable[..., Action]]:
    """Give a command the options of these dataclasses; it gets one instance of each, in this order.

    What typer calls only collects the options, the command itself runs when its result is called.
    """
    options = [field for group in groups for field in fields(group)]
    keyword = inspect.Parameter.KEYWORD_ONLY

    def decorate(command: Callable[..., int]) -> Callable[..., Action]:
        def collect(**values: Any) -> Action:
            filled = [
                group(**{field.name: values[field.name] for field in fields(group)}) for group in groups
            ]
            return partial(command, *filled)

        parameters = [
            inspect.Parameter(field.name, keyword, default=field.default, annotation=field.type)
            for field in options
        ]
        collect.__doc__ = command.__doc__
        collect.__annotations__ = {field.name: field.type for field in options}
        collect.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return collect

    return decorate


def warn(line: str) -> None:
    """One line on standard error, after what is shown there of the work."""
    start = "\r" if sys.stderr.isatty() else ""
    print(f"{start}planner: {' '.join(line.split())}", file=sys.stderr)


def values_of(options: Any) -> dict[str, Any]:
    """Each option of a group by its name, numbers read; their range is checked by whoever uses them."""
    values = {}
    for field in fields(options):
        name, value = field.name, getattr(options, field.name)
        spelled = f"--{name.replace('_', '-')}"
        if field.default is False and value is False:
            value = None  # an option that is not given says nothing, and may follow from another
        elif name in _EXAMPLES:
            value = whole(spelled, value, _EXAMPLES[name])
        elif name == "confidence":
            value = probability(spelled, value)
        elif name == "time_limit":
            value = seconds(spelled, value)
        values[name] = value
    return values


def whole(option: str, text: Text, example: str) -> int | None:
    """A whole number; its range is checked by whoever uses it."""
    if text is None:
        return None
    if not re.fullmatch(r"[+-]?[0-9]{1,100}", text):
        raise UsageError(f"{option}: {shown(text)} is refused; use a whole number, such as {example}")
    return int(text)


def probability(option: str, text: Text) -> float | None:
    """A number; its range is checked by whoever uses it."""
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{option}: {shown(text)} is refused; use a probability, such as 0.99") from None


def seconds(option: str, text: Text) -> float | None:
    """A number of seconds; its range is checked by whoever uses it."""
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{option}: {shown(text)} is refused; use a number of seconds, such as 60") from None
