"""What is to be run: the model, its inputs, the loss, the optimizer and the loop; how a user spells it."""

import keyword
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

from planner.errors import UsageError


class Mode(StrEnum):
    TRAIN = "train"
    INFER = "infer"  # eval mode, no gradients
    FORWARD = "forward"  # training mode with gradients recorded, but no loss, backward pass or optimizer
    GENERATE = "generate"  # eval mode, no gradients: a causal language model extends a prompt token by token


class ZeroGrad(StrEnum):
    BEFORE_FORWARD = "before-forward"
    BEFORE_BACKWARD = "before-backward"
    AFTER_STEP = "after-step"


class Loss(StrEnum):
    CROSS_ENTROPY = "cross_entropy"
    MSE = "mse"
    BCE_WITH_LOGITS = "bce_with_logits"
    SUM = "sum"
    OUTPUT = "output"  # the model returns its own loss


class Optimizer(StrEnum):
    SGD = "sgd"
    MOMENTUM = "momentum"
    NESTEROV = "nesterov"
    ADAM = "adam"
    ADAMW = "adamw"
    RMSPROP = "rmsprop"
    ADAGRAD = "adagrad"
    ADAFACTOR = "adafactor"


class OptimizerImpl(StrEnum):
    FOREACH = "foreach"
    FOR_LOOP = "for-loop"
    FUSED = "fused"


class Precision(StrEnum):
    FP32 = "fp32"
    AMP_FP16 = "amp-fp16"  # fp32 weights, CUDA autocast to float16
    AMP_BF16 = "amp-bf16"
    FP16 = "fp16"  # the model itself is converted, and its floating-point inputs with it
    BF16 = "bf16"


class MemoryFormat(StrEnum):
    CONTIGUOUS = "contiguous"
    CHANNELS_LAST = "channels_last"  # of the model's weights and of inputs with 4 dimensions (3-d: with 5)


class Checkpoint(StrEnum):
    NONE = "none"
    BLOCKS = "blocks"  # the repeated blocks of the model run again in the backward pass


class Lengths(StrEnum):
    FIXED = "fixed"  # every sample has the size that is given
    VARYING = "varying"  # samples are padded to the longest of their batch, which is at most as given


class ClipGradients(StrEnum):
    NONE = "none"
    NORM = "norm"  # `clip_grad_norm_` over all trained parameters before the optimizer's step
    VALUE = "value"  # `clip_grad_value_`


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One sample of a tensor, without the batch dimension.

    `str` gives its text: `3x224x224`, `128:int64`, `scalar:int64`, `input_ids=128:int64` (a keyword input),
    `batch.image=3x224x224` (an entry of one; `planner.jobs.nested` has the rest).
    """

    shape: tuple[int, ...]
    dtype: str = "float32"  # a torch dtype's name
    keyword: str | None = None  # of what holds several tensors, the way to this one as well

    def __str__(self) -> str:
        named = f"{self.keyword}=" if self.keyword else ""
        typed = "" if self.dtype == "float32" else f":{self.dtype}"
        return named + ("x".join(map(str, self.shape)) or "scalar") + typed


@dataclass(frozen=True, slots=True)
class Job:
    """One training or inference process, as far as it decides memory. The batch size is not part of it."""

    model: str  # as the user names it: a catalogue name, SOURCE:NAME or FILE.py:NAME
    model_args: tuple[tuple[str, Any], ...] = ()  # constructor keywords in the user's order; lists are tuples
    inputs: tuple[TensorSpec, ...] = ()
    target: TensorSpec | None = None
    targets: tuple[TensorSpec, ...] = ()  # in place of it, the tensors of a target that holds several
    loss: Loss | str = Loss.CROSS_ENTROPY  # one of these, or FILE.py:NAME
    mode: Mode = Mode.TRAIN
    optimizer: Optimizer = Optimizer.SGD
    optimizer_impl: OptimizerImpl = OptimizerImpl.FOREACH
    zero_grad: ZeroGrad = ZeroGrad.BEFORE_FORWARD
    keep_grads: bool = False  # `zero_grad(set_to_none=False)`
    steps: int = 3
    precision: Precision = Precision.FP32
    grad_scaler: bool = False  # `merge_job` turns it on beside `amp-fp16`, as is usual
    backward_in_autocast: bool = False  # the backward pass runs inside the autocast region
    memory_format: MemoryFormat = MemoryFormat.CONTIGUOUS
    checkpoint: Checkpoint = Checkpoint.NONE
    accumulate: int = 1  # micro-batches of the batch size in each step of the optimizer
    clip_gradients: ClipGradients = ClipGradients.NONE
    ema: bool = False  # a moving average of parameters and buffers is kept on the device
    evaluate: bool = False  # a pass in eval mode without gradients between the steps
    eval_batch: int = 0  # its batch size; 0: that of the training
    ddp: bool = False  # DistributedDataParallel's gradient buckets
    ddp_bucket_view: bool = False  # `gradient_as_bucket_view=True`
    freeze: tuple[str, ...] = ()  # patterns (fnmatch) of parameter names that are not trained
    train_only: tuple[str, ...] = ()  # patterns of those that alone are; empty: all that are not frozen
    new_tokens: int = 0  # with `generate`: tokens after the prompt, which is `inputs`
    cudnn_benchmark: bool = False  # `torch.backends.cudnn.benchmark`
    cudnn: str = ""  # whom to ask for its workspaces: a folder or "installed"; "": published runs tell
    cublas_workspace_config: str = ""  # the text of CUBLAS_WORKSPACE_CONFIG; "": it is not set
    dataset_size: int = 0  # samples of an epoch, whose last batch may be smaller; 0: all batches are full
    lengths: Lengths | None = None  # of real samples; None: by the inputs and the model (likeness.py)
    source: str = ""  # the SOURCE:NAME or FILE.py:NAME behind a catalogue name; "": `model` is one itself


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A named job of models.yaml."""

    job: Job
    batch: int  # the batch size of its origin; the default of `estimate`
    about: str  # one sentence with the origin


class ModelName(NamedTuple):
    """A model's name, taken apart."""

    source: str  # one of `SOURCES`, "file", or "" for a catalogue name
    name: str  # what the source calls it; FILE.py:NAME for a file


SOURCES = ("torchvision", "timm", "hf", "monai", "smp", "zoo")
DTYPES = (
    *("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"),
    *("complex64", "complex128"),
)
MAX_ELEMENTS = 2**40  # 4 TiB of float32 in one sample: a slip of the keyboard, not a plan

E = TypeVar("E", bound=StrEnum)


def parse_tensor_spec(text: str) -> TensorSpec:
    """Read `[KEYWORD=]SHAPE[:DTYPE]`, SHAPE being `3x224x224`, `10` or `scalar`; `str` is the inverse."""
    where = f"tensor {shown(text)}"
    named, equals, rest = text.strip().rpartition("=")
    sizes, colon, dtype = rest.partition(":")
    if equals and not _is_path(named):
        raise UsageError(
            f"{where}: {shown(named)} is no argument name; write it like input_ids=128:int64, "
            "or batch.image=3x224x224 for an entry"
        )
    if colon and dtype not in DTYPES:
        raise UsageError(f"{where}: unknown dtype {shown(dtype)}; use one of {', '.join(DTYPES)}")
    if sizes != "scalar" and not re.fullmatch(r"[0-9]+(x[0-9]+)*", sizes):
        raise UsageError(f"{where}: write positive sizes joined by x, such as 3x224x224, or scalar:int64")
    digits = [] if sizes == "scalar" else [size.lstrip("0") for size in sizes.split("x")]
    if "" in digits:
        raise UsageError(f"{where}: a size is 0; every size of one sample must be at least 1")
    # The length is looked at first because Python refuses to convert thousands of digits.
    if any(len(size) > 13 for size in digits) or math.prod(map(int, digits)) > MAX_ELEMENTS:
        raise UsageError(f"{where}: more than 2**40 elements in one sample; make it smaller")
    return TensorSpec(tuple(map(int, digits)), dtype or "float32", named or None)


def _is_path(text: str) -> bool:
    """Whether this names an argument, or a tensor within one: `batch.image`, `0.mask`, `pair[1]`."""
    head, rest = re.fullmatch(r"([^.\[]*)(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
    is_head = is_argument_name(head) or re.fullmatch(r"[0-9]{1,3}", head) is not None
    return is_head and re.fullmatch(r"(\.[\w-]{1,100}|\[[0-9]{1,3}\])*", rest) is not None


def parse_model_arg(text: str) -> tuple[str, Any]:
    """Read `KEY=VALUE`, a constructor keyword and a YAML scalar or list; lists become tuples."""
    import yaml  # 25 ms, needed by few commands

    key, equals, value = text.partition("=")
    where = f"--model-arg {shown(text)}"
    if not equals or not is_argument_name(key):
        raise UsageError(f"{where}: write KEY=VALUE, such as num_classes=10")
    try:
        return key, freeze(yaml.safe_load(value))
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise UsageError(f"{where}: the value is no YAML; quote it, or write a list as [1, 2]") from None


def freeze(value: object) -> object:
    """Turn lists into tuples, so that a `Job` stays hashable; anything but scalars and lists is refused.

    A text such as `1e-3` becomes a number: YAML 1.1, which the parser follows, takes it for a string.
    """
    if isinstance(value, list):
        return tuple(freeze(item) for item in value)
    if isinstance(value, str) and re.fullmatch(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+", value):
        return float(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    kind = type(value).__name__
    raise UsageError(f"a {kind} is neither a scalar nor a list; write a number, a text, or a list as [1, 2]")


def split_model(model: str) -> ModelName:
    """Take a model's name apart; unknown sources and halves of names are refused."""
    where = f"model {shown(model)}"
    file, _, name = model.rpartition(":")
    if file.endswith(".py") and is_argument_name(name):
        return ModelName("file", model)
    if file.endswith(".py") or model.endswith(".py"):
        raise UsageError(f"{where}: say which callable of the file builds the model: FILE.py:NAME")
    source, colon, name = model.partition(":")
    if not colon:
        return ModelName("", model)
    if source not in SOURCES:
        known = ", ".join(f"{source}:NAME" for source in SOURCES)
        raise UsageError(f"{where}: unknown source {shown(source)}; use {known} or FILE.py:NAME")
    if not name:
        raise UsageError(f"{where}: say which model of {source}: {source}:NAME")
    return ModelName(source, name)


def parse_loss(text: object) -> Loss | str:
    """Read a loss that the planner knows, or FILE.py:NAME."""
    if not isinstance(text, str):
        raise UsageError(f"--loss: a {type(text).__name__} is refused; name your own as FILE.py:NAME")
    if text in list(Loss):
        return Loss(text)
    file, _, name = text.rpartition(":")
    if file.endswith(".py") and is_argument_name(name):
        return text
    known = ", ".join(Loss)
    raise UsageError(f"--loss: unknown value {shown(text)}; use one of {known}, or FILE.py:NAME")


def is_code(loss: Loss | str) -> bool:
    """Whether a loss is a user's own, which runs code."""
    return not isinstance(loss, Loss)


def choose(kind: type[E], text: str, what: str) -> E:
    """Look up a member of `kind` by its value; `what` names the option in the error."""
    if text not in list(kind):
        raise UsageError(f"{what}: unknown value {shown(str(text))}; use one of {', '.join(kind)}")
    return kind(text)


def check_count(what: str, value: object, most: int) -> int:
    """Refuse everything but a whole number from 1 to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise UsageError(f"{what}: {shown(str(value))} is refused; use a whole number from 1 to {most}")
    return value


def is_argument_name(text: str) -> bool:
    """Whether a constructor or a forward method can take an argument of this name."""
    return text.isidentifier() and not keyword.iskeyword(text)


def nearest(name: str, known: Iterable[str]) -> str:
    """The known names that look most like `name`, case aside, at most three, joined by commas; "" if none."""
    import difflib  # only a mistake needs it

    spelled = {spelling.lower(): spelling for spelling in known}
    return ", ".join(spelled[near] for near in difflib.get_close_matches(name.lower(), spelled))


def shown(text: str) -> str:
    """Quote what the user wrote, shortened and on one line."""
    return repr(text if len(text) <= 60 else text[:57] + "...")
