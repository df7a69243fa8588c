"""Parse tensors, constructor arguments, models and losses as users write them."""

import json
import keyword
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, SupportsIndex, TypeVar

from planner.errors import UsageError
from planner.jobs.fsdp import FsdpArguments
from planner.jobs.job import Arguments, Loss, ModelName, TensorSpec

SOURCES = ("torchvision", "timm", "hf", "diffusers", "monai", "smp", "nnunet", "zoo")
DTYPES = (
    *("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"),
    *("complex64", "complex128"),
)
MAX_ELEMENTS = 2**40  # 4 TiB of float32 in one sample: a typing error

# Errors of PyYAML for 4,301 digits, `!!bool maybe`, `!!timestamp soon`, and 200 numbers joined by colons.
BAD_SCALAR = (ValueError, LookupError, AttributeError, OverflowError)

E = TypeVar("E", bound=StrEnum)


def parse_tensor_spec(text: str) -> TensorSpec:
    """Parse the text of a tensor, `[KEYWORD=]SHAPE[:DTYPE]`; `str` is the inverse.

    SHAPE is `3x224x224`, `10`, `scalar`, or `16..512` for samples of varying sizes. Raises UsageError.
    """
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
    if sizes != "scalar" and not re.fullmatch(_SIZES, sizes):
        raise UsageError(f"{where}: write positive sizes joined by x, such as 3x224x224, or scalar:int64")
    ranges = [] if sizes == "scalar" else [size.partition("..") for size in sizes.split("x")]
    lows, highs = ([part.lstrip("0") for part in side] for side in _sides(ranges))
    if "" in (*lows, *highs):
        raise UsageError(f"{where}: a size is 0; every size of one sample must be at least 1")
    # The length is checked first because Python refuses to convert thousands of digits.
    if any(len(size) > 13 for size in (*lows, *highs)) or math.prod(map(int, highs)) > MAX_ELEMENTS:
        raise UsageError(f"{where}: more than 2**40 elements in one sample; make it smaller")
    smallest, largest = tuple(map(int, lows)), tuple(map(int, highs))
    if any(low > high for low, high in zip(smallest, largest, strict=True)):
        raise UsageError(f"{where}: a range ends below its start; write SMALLEST..LARGEST, such as 16..512")
    return TensorSpec(largest, dtype or "float32", named or None, smallest if smallest != largest else ())


def check_size_of_one(text: str) -> str:
    """Check that a tensor's text has no range of sizes, and return it in normal form. Raises UsageError."""
    spec = parse_tensor_spec(text)
    if spec.smallest:
        raise UsageError(f"tensor {shown(text)}: a range of sizes is not planned here; give the largest size")
    return str(spec)


_SIZES = r"[0-9]+(\.\.[0-9]+)?(x[0-9]+(\.\.[0-9]+)?)*"


def _sides(ranges: Iterable[tuple[str, str, str]]) -> tuple[list[str], list[str]]:
    """Return the lower and the upper ends of ranges; a single size is both ends."""
    pairs = [(low, high or low) for low, _, high in ranges]
    return [low for low, _ in pairs], [high for _, high in pairs]


def _is_path(text: str) -> bool:
    """Return whether a text names an argument or a tensor inside it, such as `0.mask` and `pair[1]`."""
    head, rest = re.fullmatch(r"([^.\[]*)(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
    is_head = is_argument_name(head) or re.fullmatch(r"[0-9]{1,3}", head) is not None
    return is_head and re.fullmatch(r"(\.[\w-]{1,100}|\[[0-9]{1,3}\])*", rest) is not None


def parse_arguments(given: Mapping[str, Any] | str | Sequence[str], flag: str) -> Arguments:
    """Convert a mapping, or texts KEY=VALUE, to pairs of name and value.

    `flag` is the option that errors name. Raises UsageError.
    """
    if isinstance(given, Mapping):
        values = {key: list(value) if isinstance(value, tuple) else value for key, value in given.items()}
        return tuple((key, freeze(value)) for key, value in values.items())
    texts = [given] if isinstance(given, str) else given
    if not all(isinstance(text, str) for text in texts):
        raise UsageError(f"{flag}: write KEY=VALUE, or give a dict")
    return tuple(parse_model_arg(text, flag) for text in texts)


def argument_texts(arguments: Arguments | FsdpArguments) -> list[str]:
    """Convert arguments to texts KEY=VALUE for `parse_arguments`, skipping defaults of `FsdpArguments`."""
    values = arguments.non_default() if isinstance(arguments, FsdpArguments) else dict(arguments)
    return [f"{key}={_argument_text(value)}" for key, value in values.items()]


def _argument_text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_argument_text, value))}]"
    if isinstance(value, str):
        is_plain = re.fullmatch(r"[\w./-]+", value) and parse_model_arg(f"value={value}")[1] == value
        return value if is_plain else json.dumps(value, ensure_ascii=False)
    if isinstance(value, float) and math.isinf(value):
        return ".inf" if value > 0 else "-.inf"
    return json.dumps(value)


def parse_model_arg(text: str, flag: str = "--model-arg") -> tuple[str, Any]:
    """Parse `KEY=VALUE` to a keyword and its value: a YAML scalar, None, or a list, which becomes a tuple.

    `flag` is the option that errors name. Raises UsageError.
    """
    import yaml  # imported late: 25 ms, needed by few commands

    key, equals, value = text.partition("=")
    where = f"{flag} {shown(text)}"
    if not equals or not is_argument_name(key):
        raise UsageError(f"{where}: write KEY=VALUE, such as num_classes=10")
    try:
        loaded = None if value.strip() == "None" else yaml.safe_load(value)
        if isinstance(loaded, dict) and flag == "--model-arg":
            inner = f"for an hf: model give the values within {key} one by one, as {flag} {key}__NAME=VALUE"
            raise UsageError(f"a dict is neither a scalar nor a list; {inner}")
        return key, freeze(loaded)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    except (yaml.YAMLError, *BAD_SCALAR, RecursionError):
        raise UsageError(f"{where}: the value is no YAML; quote it, or write a list as [1, 2]") from None


def parse_peft_method(text: str) -> str:
    """Return the name of a peft method, which need not exist, in lower case with underscores."""
    name = text.strip().lower().replace("-", "_")
    if name and not name.isidentifier():
        raise UsageError(f"--peft: {shown(text)} is no method of peft; write one such as lora")
    return name


def freeze(value: object) -> object:
    """Convert lists to tuples, so that a `Job` is hashable.

    Only scalars and lists are accepted. A text such as `1e-3`, which YAML 1.1 reads as a string, becomes a
    number. Raises UsageError, also for nan.
    """
    if isinstance(value, list):
        return tuple(freeze(item) for item in value)
    if isinstance(value, str) and re.fullmatch(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+", value):
        return float(value)
    if isinstance(value, float) and math.isnan(value):
        raise UsageError("nan is no number; remove the argument, or write one")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    kind = type(value).__name__
    raise UsageError(f"a {kind} is neither a scalar nor a list; write a number, a text, or a list as [1, 2]")


def split_model(model: str) -> ModelName:
    """Split a model's name into source and name. Raises UsageError for an unknown source or an empty name."""
    where = f"model {shown(model)}"
    if is_file_name(model, where):
        return ModelName("file", model)
    if model.rpartition(":")[0].endswith(".py") or model.endswith(".py"):
        file = model if model.endswith(".py") else model.rpartition(":")[0]
        raise UsageError(
            f"{where}: say which name in the file is the model, the training step or the Trainer, such as "
            f"{file}:train_step"
        )
    source, colon, name = model.partition(":")
    if not colon:
        return ModelName("", model)
    if source not in SOURCES:
        sources = ", ".join(f"{source}:NAME" for source in SOURCES)
        raise UsageError(f"{where}: unknown source {shown(source)}; use {sources} or FILE.py:NAME")
    if not name:
        raise UsageError(f"{where}: say which model of {source}: {source}:NAME")
    return ModelName(source, name)


def parse_loss(text: object) -> Loss | str:
    """Parse a loss, given by its name or as FILE.py:NAME. Raises UsageError."""
    if not isinstance(text, str):
        raise UsageError(f"--loss: {kind_text(text)} is refused; name your own as FILE.py:NAME")
    if text in list(Loss):
        return Loss(text)
    if is_file_name(text, f"--loss: {shown(text)}"):
        return text
    losses = ", ".join(Loss)
    raise UsageError(f"--loss: unknown value {shown(text)}; use one of {losses}, or FILE.py:NAME")


def is_file_name(text: str, where: str) -> bool:
    """Return whether a text has the form FILE.py:NAME or FILE.py:CLASS.METHOD.

    Raises UsageError for a text that is not UTF-8, which no trace file could store.
    """
    if any("\ud800" <= letter <= "\udfff" for letter in text):  # bytes of a path that are not UTF-8
        raise UsageError(f"{where}: the name is no UTF-8; rename the file")
    file, _, name = text.rpartition(":")
    return file.endswith(".py") and all(map(is_argument_name, name.split(".")))


def is_code(loss: Loss | str) -> bool:
    """Return whether a loss is given as FILE.py:NAME, which runs code."""
    return not isinstance(loss, Loss)


def choose(kind: type[E], text: str, what: str) -> E:
    """Return the member of `kind` whose value is `text`. Raises UsageError that names the option `what`."""
    if text not in list(kind):
        raise UsageError(f"{what}: unknown value {shown(str(text))}; use one of {', '.join(kind)}")
    return kind(text)


def check_count(what: str, value: object, most: int, least: int = 1) -> int:
    """Return `value` as an int if it is a whole number from `least` to `most`, else raise UsageError."""
    number = value.__index__() if isinstance(value, SupportsIndex) and not isinstance(value, bool) else None
    if number is None or not least <= number <= most:
        problem = "is a string" if isinstance(value, str) else "is refused"
        raise UsageError(f"{what}: {shown(str(value))} {problem}; use a whole number from {least} to {most}")
    return number


def is_argument_name(text: str) -> bool:
    """Return whether a text can be the name of an argument in Python."""
    return text.isidentifier() and not keyword.iskeyword(text)


def nearest(name: str, names: Iterable[str]) -> str:
    """Return up to three similar names, joined by commas, or "" if no name is similar."""
    import difflib  # imported late: only for mistakes

    spelled = {spelling.lower(): spelling for spelling in names}
    return ", ".join(spelled[near] for near in difflib.get_close_matches(name.lower(), spelled))


def kind_text(value: object) -> str:
    """Return the name of a value's class with its article, such as "an int"."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


def shown(text: str) -> str:
    """Return a user's text in quotes, shortened and on one line."""
    return repr(text if len(text) <= 60 else text[:57] + "...")
