"""The reader of campaign files: which jobs are measured at which batch sizes, in order of worth.

A file has `about` and `groups`. A group's keys: `about`, `models` and `batches`, all required; `caps_mib`
(allocator caps, under which the true largest batch is sought; `batches` then are where the search starts),
`history` (those of its batches whose allocator history is kept), the options of a job as the command line
names them (`input`, `target`, `loss`, `mode`, `optimizer`, `optimizer_impl`, `zero_grad`), `alloc_conf` and
`cudnn_benchmark`. All batches of a model come before the next model, so that each is soon of use.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.allocator_rules import parse_alloc_conf
from planner.device import LARGEST_TOTAL_MIB, MIB
from planner.errors import UsageError
from planner.job import CatalogueEntry, Job, parse_tensor_spec
from planner.resolve import resolve_job
from planner.strict_yaml import Entry, read_entry

STANDARD = Path(__file__).with_name("campaigns") / "standard.yaml"
LARGEST_BATCH = 2**20
_OF_JOB = ("loss", "mode", "optimizer", "optimizer_impl", "zero_grad")
_OPTIONAL = ("caps_mib", "history", "input", "target", *_OF_JOB, "alloc_conf", "cudnn_benchmark")


@dataclass(frozen=True, slots=True)
class Series:
    """One job at several batch sizes or, where there are caps, its largest batch under each."""

    job: Job
    batches: tuple[int, ...]
    caps_bytes: tuple[int, ...] = ()
    histories: tuple[int, ...] = ()  # batch sizes
    alloc_conf: str = ""
    cudnn_benchmark: bool = False


def load_campaign(
    catalogue: Mapping[str, CatalogueEntry], path: Path = STANDARD
) -> tuple[tuple[Series, ...], str]:
    """The series of a campaign in their order, and what it is about.

    Raises DataFileError with file, line and key for anything that is wrong with it.
    """
    parts = read_entry(path).children(("about", "groups"))
    series = [one for group in parts["groups"].items() for one in _read_group(group, catalogue)]
    if not series:
        raise parts["groups"].broken("a group is wanted")
    return tuple(series), parts["about"].text()


def _read_group(group: Entry, catalogue: Mapping[str, CatalogueEntry]) -> list[Series]:
    parts = group.children(("about", "models", "batches"), _OPTIONAL)
    parts["about"].text()
    options: dict[str, Any] = {name: parts[name].text() for name in _OF_JOB if name in parts}
    if "input" in parts:
        options["inputs"] = [_sample(item) for item in parts["input"].items()]
    if "target" in parts:
        options["target"] = _sample(parts["target"])
    batches = _counts(parts["batches"], LARGEST_BATCH)
    histories = _counts(parts["history"], LARGEST_BATCH) if "history" in parts else ()
    if not set(histories) <= set(batches):
        raise parts["history"].broken("some of the group's batches are wanted")
    caps = _counts(parts["caps_mib"], LARGEST_TOTAL_MIB) if "caps_mib" in parts else ()
    return [
        Series(
            _job(item, catalogue, options),
            batches,
            tuple(cap * MIB for cap in caps),
            histories,
            _alloc_conf(parts["alloc_conf"]) if "alloc_conf" in parts else "",
            _truth(parts["cudnn_benchmark"]) if "cudnn_benchmark" in parts else False,
        )
        for item in _items(parts["models"])
    ]


def _job(item: Entry, catalogue: Mapping[str, CatalogueEntry], options: Mapping[str, Any]) -> Job:
    try:
        return resolve_job(item.text(), catalogue, **options)
    except UsageError as error:
        raise item.broken(str(error)) from None


def _alloc_conf(entry: Entry) -> str:
    try:
        parse_alloc_conf(entry.text())
    except UsageError as error:
        raise entry.broken(str(error)) from None
    return entry.text()


def _truth(entry: Entry) -> bool:
    if not (entry.says("true") or entry.says("false")):
        raise entry.broken("true or false is wanted")
    return entry.says("true")


def _sample(entry: Entry) -> Any:
    # A sample of one size, such as 10, is a number to YAML.
    text = str(entry.node.value) if entry.node.tag.endswith(":int") else entry.text()
    try:
        return parse_tensor_spec(text)
    except UsageError as error:
        raise entry.broken(str(error)) from None


def _counts(entry: Entry, most: int) -> tuple[int, ...]:
    numbers = [item.number(1, most) for item in _items(entry)]
    if any(number != int(number) for number in numbers) or len(set(numbers)) < len(numbers):
        raise entry.broken("different whole numbers are wanted")
    return tuple(map(int, numbers))


def _items(entry: Entry) -> list[Entry]:
    items = entry.items()
    if not items:
        raise entry.broken("the list is empty")
    return items
