"""Read a job's fields from YAML files.

The fields are options, tensors, constructor arguments, and models by name. Files of unknown origin are safe
to read: nothing that they name is executed. Code runs only if the user named it on the command line, or
allowed the file to name it with --allow-code. No file can name a library; a library's folder is given on the
command line only (docs/robustness.md).
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from planner._support.strict_yaml import Entry
from planner.allocator import parse_alloc_conf
from planner.errors import UsageError
from planner.jobs.job import CUDNN_OF_FILES, CatalogueEntry, Job, TensorSpec, is_cudnn_of_files
from planner.jobs.optimizer_names import optimizer_runs_code, parse_optimizer
from planner.jobs.options import FIELD_OPTIONS, JobOption, OptionKind
from planner.jobs.parse import (
    BAD_SCALAR,
    SOURCES,
    freeze,
    is_argument_name,
    is_code,
    parse_loss,
    parse_tensor_spec,
    split_model,
)
from planner.jobs.resolve import resolve_job

T = TypeVar("T")
MAX_VALUES = 10_000  # limit for the arguments of one model; aliases of aliases of lists could make billions
PATH_KEYS = ("sizes", "deepspeed")  # options whose values may be the paths of files
_OF_PATHS = ("hf", "diffusers")  # sources whose names may be folders; the names of nnU-Net are files
OPTION_KEYS = (*FIELD_OPTIONS, "input", "target", "optimizer_arg")  # keys of files that describe jobs
FILE = "file"  # source of a FILE.py:NAME
ANY_SOURCE = (*SOURCES, FILE)  # for --allow-code


def allowed_sources(options: Mapping[str, object]) -> Collection[str]:
    """Return the sources of models that data files may name: with the option `allow_code` also files."""
    return ANY_SOURCE if options.get("allow_code") else SOURCES


def read_options(parts: Mapping[str, Entry], sources: Collection[str]) -> dict[str, Any]:
    """Return the job options among the entries of a mapping, for `merge_job`. Raises DataFileError."""
    options = {
        name: _value_of(option, parts[name]) for name, option in FIELD_OPTIONS.items() if name in parts
    }
    if "cudnn" in parts:
        options["cudnn"] = read_cudnn(parts["cudnn"])
    for name in PATH_KEYS:
        if name in parts:
            check_path(parts[name], sources)
    if "loss" in parts:
        options["loss"] = read_loss(parts["loss"], sources)
    if "optimizer" in parts:
        options["optimizer"] = read_optimizer(parts["optimizer"], sources)
    if "optimizer_arg" in parts:
        options["optimizer_args"] = read_arguments(parts["optimizer_arg"])
    if "input" in parts:
        options["inputs"] = [read_sample(item) for item in read_items(parts["input"])]
    if "target" in parts:
        options |= _read_target(parts["target"])
    return options


def _value_of(option: JobOption, entry: Entry) -> Any:
    import yaml

    if option.kind is OptionKind.FLAG:
        return read_flag(entry)
    if option.kind is OptionKind.COUNT:
        return read_count(entry, option.maximum, option.minimum)
    if option.kind is OptionKind.ARGUMENTS and isinstance(entry.node, yaml.MappingNode):
        return dict(read_arguments(entry))
    if option.kind in (OptionKind.PATTERNS, OptionKind.ARGUMENTS):
        return [item.text() for item in read_items(entry)]
    if option.kind is OptionKind.CHOICE and option.choices is not None:
        return entry.convert(option.choices)
    return entry.text()


def parse_entry(entry: Entry, parse: Callable[..., T], *given: Any, **options: Any) -> T:
    """Call `parse` and return its result; turn its UsageError into a DataFileError about the entry."""
    try:
        return parse(*given, **options)
    except UsageError as error:
        what = str(error).removeprefix("--cublas-workspace-config: ")
        what = what.removeprefix("--loss: ").removeprefix("--optimizer: ")
        raise entry.broken(what) from None


def read_sample(entry: Entry) -> TensorSpec:
    """Return an entry such as 3x224x224 as a tensor's shape and type.

    Raises DataFileError, as all `read_` functions of the module do.
    """
    # A sample of one size, such as 10, is a number to YAML.
    text = str(entry.node.value) if entry.node.tag.endswith(":int") else entry.text()
    return parse_entry(entry, parse_tensor_spec, text)


def _read_target(entry: Entry) -> dict[str, Any]:
    """Return the shapes and types of training targets (labels) in an entry, as values for `Job.replace`."""
    import yaml

    if not isinstance(entry.node, yaml.SequenceNode):
        target = read_sample(entry)
        return {"target": target} if target.keyword is None else {"targets": (target,)}
    items = read_items(entry)
    targets = tuple(map(read_sample, items))
    for item, target in zip(items, targets, strict=True):
        if target.keyword is None:
            raise item.broken("of several targets, each needs a name, such as boxes=100x4")
    return {"targets": targets}


def read_count(entry: Entry, maximum: int, minimum: int = 1) -> int:
    """Return the entry as a whole number within bounds."""
    kind: Any = Annotated[float, Meta(ge=minimum, le=maximum)]
    number = entry.convert(kind)
    if number != int(number):
        raise entry.broken(f"expected a whole number, got {number}")
    return int(number)


def read_flag(entry: Entry) -> bool:
    """Return the entry, which must be `true` or `false`, as a bool."""
    if not (entry.is_word("true") or entry.is_word("false")):
        raise entry.broken("expected true or false")
    return entry.is_word("true")


def read_items(entry: Entry) -> list[Entry]:
    """Return the items of an entry that must be a non-empty list."""
    items = entry.items()
    if not items:
        raise entry.broken("the list is empty")
    return items


def read_alloc_conf(entry: Entry) -> str:
    """Return the entry's text after checking it as PYTORCH_ALLOC_CONF."""
    parse_entry(entry, parse_alloc_conf, entry.text())
    return entry.text()


def read_arguments(entry: Entry) -> list[tuple[str, Any]]:
    """Return a mapping's keys and values as arguments of a constructor, with lists as tuples."""
    arguments: list[tuple[str, Any]] = []
    values = count(1)
    for key, value in entry.mapping().items():
        if not is_argument_name(key):
            raise value.broken("expected the name of an argument")
        try:
            arguments.append((key, _read_argument(value, values)))
        except RecursionError:
            raise value.broken("the list contains itself; write it out") from None
    return arguments


def _read_argument(entry: Entry, values: Iterator[int]) -> object:
    import yaml

    if next(values) > MAX_VALUES:
        raise entry.broken(f"more than {MAX_VALUES:,} values; a model takes fewer")
    if isinstance(entry.node, yaml.SequenceNode):
        return tuple(_read_argument(item, values) for item in entry.items())
    if isinstance(entry.node, yaml.MappingNode):
        raise entry.broken("expected a scalar or a list, got keys with values")
    try:
        return freeze(yaml.constructor.SafeConstructor().construct_object(entry.node))
    except (yaml.YAMLError, *BAD_SCALAR, UsageError):
        raise entry.broken(
            f"expected a number, a string, true, false or null, got {entry.node.value!r}"
        ) from None


# ---- models, losses and optimizers by name


def read_source(entry: Entry, model: str, sources: Collection[str]) -> str:
    """Check that a file may name a model, and return the model's source, or "" for a catalogue name.

    Raises DataFileError.
    """
    source, name = parse_entry(entry, split_model, model)
    _check_code(entry, model, source == FILE, sources)
    is_path = source == "nnunet" or (source in _OF_PATHS and ("/" in name or Path(name).is_dir()))
    if is_path and FILE not in sources:
        raise entry.broken(f"{model!r} is a path; --allow-code lets files name paths that you trust")
    return source


def check_path(entry: Entry, sources: Collection[str]) -> None:
    """Raise DataFileError if an entry is a path and `sources` does not allow files to name paths."""
    text = entry.text()
    is_path = not text.lstrip().startswith("{")  # DeepSpeed's configuration itself may be given
    if is_path and FILE not in sources:
        raise entry.broken(f"{text!r} is a path; --allow-code lets files name paths that you trust")


def read_cudnn(entry: Entry) -> str:
    """Return the entry as the source of convolution workspaces. Raises DataFileError for a folder."""
    text = entry.text()
    if not is_cudnn_of_files(text):
        raise entry.broken(
            f"{text!r} is no {', '.join(CUDNN_OF_FILES)}; a folder, whose library would be loaded, is given "
            "on the command line alone: --cudnn FOLDER"
        )
    return text


def read_loss(entry: Entry, sources: Collection[str]) -> str:
    """Return the entry's text after checking it as a loss.

    Raises DataFileError, also for code that is not allowed.
    """
    text = entry.text()
    _check_code(entry, text, is_code(parse_entry(entry, parse_loss, text)), sources)
    return text


def read_optimizer(entry: Entry, sources: Collection[str]) -> str:
    """Return the entry's text after checking it as an optimizer.

    Raises DataFileError, also for code that is not allowed.
    """
    text = entry.text()
    _check_code(entry, text, optimizer_runs_code(parse_entry(entry, parse_optimizer, text)), sources)
    return text


def _check_code(entry: Entry, name: str, runs_code: bool, sources: Collection[str]) -> None:
    if runs_code and FILE not in sources:
        raise entry.broken(f"{name!r} would run code; --allow-code lets files name code that you trust")


def read_model(
    entry: Entry,
    catalogue: Mapping[str, CatalogueEntry],
    sources: Collection[str] = SOURCES,
    **options: Any,
) -> Job:
    """Return the complete job of the model that an entry names, with `options` applied.

    Raises DataFileError with file, line and key.
    """
    name = entry.text()
    read_source(entry, name, sources)
    return parse_entry(entry, resolve_job, name, catalogue, **options)
