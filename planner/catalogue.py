"""The reader of models.yaml: named jobs, read strictly; an error names the line and the key.

The file maps names to entries. An entry's keys: `source` (SOURCE:NAME or FILE.py:NAME) and `about` (one
sentence with the origin), both required; `args` (constructor keywords), `inputs` (a list of samples such as
3x224x224), `target`, `loss`, `mode`, `optimizer`, `steps`, `batch`.
"""

from pathlib import Path
from typing import Any

from planner.errors import UsageError
from planner.job import (
    CatalogueEntry,
    Loss,
    Mode,
    Optimizer,
    TensorSpec,
    freeze,
    is_argument_name,
    parse_tensor_spec,
    split_model,
)
from planner.resolve import MAX_STEPS, complete_job, default_job, merge_job
from planner.strict_yaml import Entry, read_entry

MAX_BATCH = 2**31

_REQUIRED = ("source", "about")
_OPTIONAL = ("args", "inputs", "target", "loss", "mode", "optimizer", "steps", "batch")


def load_catalogue(path: Path | None = None) -> dict[str, CatalogueEntry]:
    """Read a catalogue, by default the planner's own. Raises `DataFileError`."""
    return {name: _read_job(name, entry) for name, entry in read_entry(path or _own_path()).mapping().items()}


def _own_path() -> Path:
    """In an installed package the file lies beside the modules, in a checkout at the repository's root."""
    package = Path(__file__).parent
    installed = package / "models.yaml"
    return installed if installed.exists() else package.parent / "models.yaml"


def _read_job(name: str, entry: Entry) -> CatalogueEntry:
    if not name or ":" in name or name.endswith(".py"):
        raise entry.broken("a name that --model could take for a source or a file; take another")
    values = entry.children(_REQUIRED, _OPTIONAL)
    fields: dict[str, Any] = {}
    for key, kind in (("loss", Loss), ("mode", Mode), ("optimizer", Optimizer)):
        if key in values:
            fields[key] = values[key].choice(list(kind))
    if "args" in values:
        fields["model_args"] = tuple(_args(values["args"]))
    if "inputs" in values:
        fields["inputs"] = tuple(_sample(item) for item in values["inputs"].items())
    if "target" in values:
        fields["target"] = _sample(values["target"])
    if "steps" in values:
        fields["steps"] = _count(values["steps"], MAX_STEPS)
    batch = _count(values["batch"], MAX_BATCH) if "batch" in values else 1
    job = merge_job(default_job(name, _source(values["source"])), fields)
    if not job.inputs:
        raise entry.broken("missing inputs, for which its source has no default")
    try:
        complete_job(job)
    except UsageError as error:
        raise entry.broken(str(error)) from None
    return CatalogueEntry(job, batch, values["about"].text())


def _source(entry: Entry) -> str:
    source = entry.text()
    try:
        named = split_model(source).source
    except UsageError as error:
        raise entry.broken(str(error)) from None
    if not named:
        raise entry.broken(f"SOURCE:NAME or FILE.py:NAME is wanted, not {source!r}")
    return source


def _args(entry: Entry) -> list[tuple[str, Any]]:
    args: list[tuple[str, Any]] = []
    for key, value in entry.mapping().items():
        if not is_argument_name(key):
            raise value.broken("the name of an argument is wanted")
        try:
            args.append((key, _value(value)))
        except RecursionError:
            raise value.broken("the list contains itself; write it out") from None
    return args


def _value(entry: Entry) -> object:
    """A scalar or a list of an argument, lists as tuples."""
    import yaml

    if isinstance(entry.node, yaml.SequenceNode):
        return tuple(_value(item) for item in entry.items())
    if isinstance(entry.node, yaml.MappingNode):
        raise entry.broken("a scalar or a list is wanted, not keys with values")
    try:
        return freeze(yaml.constructor.SafeConstructor().construct_object(entry.node))
    except (yaml.YAMLError, ValueError, UsageError):
        raise entry.broken(f"a number, a text, a truth or null is wanted, not {entry.node.value!r}") from None


def _sample(entry: Entry) -> TensorSpec:
    # A sample of one size, such as 10, is a number to YAML.
    text = str(entry.node.value) if entry.node.tag.endswith(":int") else entry.text()
    try:
        return parse_tensor_spec(text)
    except UsageError as error:
        raise entry.broken(str(error)) from None


def _count(entry: Entry, most: int) -> int:
    number = entry.number(1, most)
    if number != int(number):
        raise entry.broken(f"a whole number is wanted, not {number}")
    return int(number)
