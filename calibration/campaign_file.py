"""The reader of campaign files: which jobs are measured at which batch sizes, in order of worth.

A file has `about` and `groups`. A group's keys: `about`, `models` and `batches`, all required; `caps_mib`
(allocator caps, under which the true largest batch is sought; `batches` then are where the search starts),
`history` (those of its batches whose allocator history is kept), `alloc_conf`, and the options of a job as
the command line names them. All batches of a model come before the next model, so that each is soon of use.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from planner._support.strict_yaml import Entry, read_entry
from planner.hardware import LARGEST_TOTAL_MIB, MIB
from planner.jobs import (
    OPTION_KEYS,
    SOURCES,
    CatalogueEntry,
    Job,
    read_alloc_conf,
    read_items,
    read_model,
    read_options,
)

STANDARD = Path(__file__).with_name("campaigns") / "standard.yaml"
LARGEST_BATCH = 2**20
_OPTIONAL = ("caps_mib", "history", *OPTION_KEYS, "alloc_conf")


@dataclass(frozen=True, slots=True)
class Series:
    """One job at several batch sizes or, where there are caps, its largest batch under each."""

    job: Job
    batches: tuple[int, ...]
    caps_bytes: tuple[int, ...] = ()
    histories: tuple[int, ...] = ()  # batch sizes
    alloc_conf: str = ""


def load_campaign(
    catalogue: Mapping[str, CatalogueEntry], path: Path = STANDARD, sources: Collection[str] = SOURCES
) -> tuple[tuple[Series, ...], str]:
    """The series of a campaign in their order, and what it is about.

    Raises DataFileError with file, line and key for anything that is wrong with it, also for a FILE.py:NAME
    where "file" is none of the `sources`: it would run code.
    """
    parts = read_entry(path).children(("about", "groups"))
    series = [one for group in parts["groups"].items() for one in _read_group(group, catalogue, sources)]
    if not series:
        raise parts["groups"].broken("a group is wanted")
    return tuple(series), parts["about"].text()


def _read_group(
    group: Entry, catalogue: Mapping[str, CatalogueEntry], sources: Collection[str]
) -> list[Series]:
    parts = group.children(("about", "models", "batches"), _OPTIONAL)
    parts["about"].text()
    options = read_options(parts, sources)
    batches = _counts(parts["batches"], LARGEST_BATCH)
    histories = _counts(parts["history"], LARGEST_BATCH) if "history" in parts else ()
    if not set(histories) <= set(batches):
        raise parts["history"].broken("some of the group's batches are wanted")
    caps = _counts(parts["caps_mib"], LARGEST_TOTAL_MIB) if "caps_mib" in parts else ()
    return [
        Series(
            read_model(item, catalogue, sources, **options),
            batches,
            tuple(cap * MIB for cap in caps),
            histories,
            read_alloc_conf(parts["alloc_conf"]) if "alloc_conf" in parts else "",
        )
        for item in read_items(parts["models"])
    ]


def _counts(entry: Entry, most: int) -> tuple[int, ...]:
    numbers = [item.number(1, most) for item in read_items(entry)]
    if any(number != int(number) for number in numbers) or len(set(numbers)) < len(numbers):
        raise entry.broken("different whole numbers are wanted")
    return tuple(map(int, numbers))
