"""Read campaign files, which list jobs and batch sizes to measure.

The most useful jobs come first. A file has `about` and `groups`. A group's keys: `about`, `models` and
`batches`, all required; `caps_mib` (allocator caps under which the true largest batch is searched, starting
from `batches`), `history` (the batches whose allocator history is saved), `alloc_conf`, and the options of a
job as the command line names them. All batches of a model come before the next model, so that the calibration
of each model is complete early.
"""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

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

_FOLDER = Path(__file__).with_name("campaigns")
STANDARD = _FOLDER / "standard.yaml"
INCLUDED = {"standard": STANDARD, "quick": _FOLDER / "quick.yaml"}  # by their names on the command line

_OPTIONAL = ("caps_mib", "history", *OPTION_KEYS, "alloc_conf")
_Batches = Annotated[tuple[Annotated[int, Meta(ge=1, le=2**20)], ...], Meta(min_length=1)]
_Caps = Annotated[tuple[Annotated[int, Meta(ge=1, le=LARGEST_TOTAL_MIB)], ...], Meta(min_length=1)]


class BatchSeries(Struct, frozen=True):
    """A job of a campaign, with batch sizes to run, or with caps under which to search the largest batch.

    Without caps, one run is made at each batch size. With caps, the largest batch size is searched under each
    cap, starting from `batches`.
    """

    job: Job
    batches: tuple[int, ...]
    caps_bytes: tuple[int, ...] = ()
    histories: tuple[int, ...] = ()  # batch sizes at which the allocator's history is saved
    alloc_conf: str = ""  # the text of PYTORCH_ALLOC_CONF


def load_campaign(
    catalogue: Mapping[str, CatalogueEntry], path: Path = STANDARD, sources: Collection[str] = SOURCES
) -> tuple[tuple[BatchSeries, ...], str]:
    """Return the series of runs in a campaign file, and its description.

    The series are in the order of the file. Raises DataFileError for an invalid file. A model FILE.py:NAME,
    which would run code, is invalid unless `sources` contains "file".
    """
    parts = read_entry(path).children(("about", "groups"))
    series = [one for group in parts["groups"].items() for one in _read_group(group, catalogue, sources)]
    if not series:
        raise parts["groups"].broken("expected at least one group")
    return tuple(series), parts["about"].text()


def _read_group(
    group: Entry, catalogue: Mapping[str, CatalogueEntry], sources: Collection[str]
) -> list[BatchSeries]:
    parts = group.children(("about", "models", "batches"), _OPTIONAL)
    parts["about"].text()
    options = read_options(parts, sources)
    batches = _distinct(parts["batches"], _Batches)
    histories = _distinct(parts["history"], _Batches) if "history" in parts else ()
    if not set(histories) <= set(batches):
        raise parts["history"].broken("expected some of the group's batches")
    caps = _distinct(parts["caps_mib"], _Caps) if "caps_mib" in parts else ()
    return [
        BatchSeries(
            read_model(item, catalogue, sources, **options),
            batches,
            tuple(cap * MIB for cap in caps),
            histories,
            read_alloc_conf(parts["alloc_conf"]) if "alloc_conf" in parts else "",
        )
        for item in read_items(parts["models"])
    ]


def _distinct(entry: Entry, kind: Any) -> tuple[int, ...]:
    values: tuple[int, ...] = entry.convert(kind)
    if len(set(values)) < len(values):
        raise entry.broken("expected different values")
    return values
