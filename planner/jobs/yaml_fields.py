"""Parts of jobs as people write them into YAML: samples, counts, truths and arguments of constructors."""

from collections.abc import Iterator
from itertools import count
from typing import Any

from planner._support.strict_yaml import Entry
from planner.allocator import parse_alloc_conf
from planner.errors import UsageError
from planner.jobs.job import TensorSpec, freeze, is_argument_name, parse_tensor_spec

MOST_VALUES = 10_000  # of the arguments of one model; aliases of aliases of lists could make billions


def sample_of(entry: Entry) -> TensorSpec:
    """One sample of a tensor, such as 3x224x224. Raises DataFileError, as all of these."""
    # A sample of one size, such as 10, is a number to YAML.
    text = str(entry.node.value) if entry.node.tag.endswith(":int") else entry.text()
    try:
        return parse_tensor_spec(text)
    except UsageError as error:
        raise entry.broken(str(error)) from None


def targets_of(entry: Entry) -> dict[str, Any]:
    """A target, or a list of those that it holds, each with a name: the options of a job."""
    import yaml

    if not isinstance(entry.node, yaml.SequenceNode):
        target = sample_of(entry)
        return {"target": target} if target.keyword is None else {"targets": (target,)}
    items = items_of(entry)
    targets = tuple(map(sample_of, items))
    for item, target in zip(items, targets, strict=True):
        if target.keyword is None:
            raise item.broken("of several targets, each needs a name, such as boxes=100x4")
    return {"targets": targets}


def count_of(entry: Entry, most: int) -> int:
    """A whole number from 1."""
    number = entry.number(1, most)
    if number != int(number):
        raise entry.broken(f"a whole number is wanted, not {number}")
    return int(number)


def truth_of(entry: Entry) -> bool:
    """`true` or `false`."""
    if not (entry.says("true") or entry.says("false")):
        raise entry.broken("true or false is wanted")
    return entry.says("true")


def items_of(entry: Entry) -> list[Entry]:
    """The values of a list that has some."""
    items = entry.items()
    if not items:
        raise entry.broken("the list is empty")
    return items


def alloc_conf_of(entry: Entry) -> str:
    """A text of PYTORCH_ALLOC_CONF."""
    try:
        parse_alloc_conf(entry.text())
    except UsageError as error:
        raise entry.broken(str(error)) from None
    return entry.text()


def arguments_of(entry: Entry) -> list[tuple[str, Any]]:
    """Keywords of a constructor: scalars, and lists as tuples."""
    arguments: list[tuple[str, Any]] = []
    values = count(1)
    for key, value in entry.mapping().items():
        if not is_argument_name(key):
            raise value.broken("the name of an argument is wanted")
        try:
            arguments.append((key, _value(value, values)))
        except RecursionError:
            raise value.broken("the list contains itself; write it out") from None
    return arguments


def _value(entry: Entry, values: Iterator[int]) -> object:
    import yaml

    if next(values) > MOST_VALUES:
        raise entry.broken(f"more than {MOST_VALUES:,} values; a model takes fewer")
    if isinstance(entry.node, yaml.SequenceNode):
        return tuple(_value(item, values) for item in entry.items())
    if isinstance(entry.node, yaml.MappingNode):
        raise entry.broken("a scalar or a list is wanted, not keys with values")
    try:
        return freeze(yaml.constructor.SafeConstructor().construct_object(entry.node))
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, UsageError):
        # The middle two are PyYAML's answers to `!!bool maybe` and `!!timestamp soon`.
        raise entry.broken(f"a number, a text, a truth or null is wanted, not {entry.node.value!r}") from None
