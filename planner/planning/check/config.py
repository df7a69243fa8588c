"""Read `[tool.planner]` of a pyproject.toml: jobs, GPUs and budgets.

    [tool.planner]
    gpus = ["RTX 4090", 24000]        # names of GPUs, or totals in MiB
    budget = "16GiB"                  # a bound on the memory of the process, in addition to GPUs or instead

    [tool.planner.jobs.finetune]      # a name, and options as the command line has them, with underscores
    model = "resnet50"
    batch = 64
    optimizer = "adamw"

The gpus, budget, confidence and headroom of a job override the table's. docs/check.md describes all keys.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from enum import StrEnum
from pathlib import Path

from msgspec import Struct

from planner._support.strict_yaml import Entry
from planner._support.toml_entries import read_toml_table
from planner.errors import DataFileError, UsageError
from planner.hardware import LARGEST_TOTAL_MIB, MIB, Device, check_confidence, find_device, generic_device
from planner.jobs import (
    OPTION_KEYS,
    CatalogueEntry,
    Job,
    parse_entry,
    read_alloc_conf,
    read_arguments,
    read_count,
    read_items,
    read_model,
    read_options,
    shown,
)
from planner.program import LARGEST_BATCH

CONFIG_NAME = "pyproject.toml"
TABLE = ("tool", "planner")
_UNITS = {"MiB": MIB, "GiB": 2**30, "TiB": 2**40, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_SIZE = re.compile(r"(\d{1,9}(?:\.\d{1,6})?) ?(MiB|GiB|TiB|MB|GB|TB|%)")
_LIMITS = ("gpus", "budget", "confidence", "headroom")  # of all jobs, or of one


class FailOn(StrEnum):
    """The mildest verdict that fails a check."""

    TIGHT = "tight"
    RISKY = "risky"
    OUT_OF_MEMORY = "out-of-memory"


class Headroom(Struct, frozen=True):
    """An amount of memory: a size, or a share of the available memory.

    A job that leaves less free than its headroom has the verdict TIGHT.
    """

    size_bytes: int = 0
    share: float = 0.0  # of the available memory; counts if `size_bytes` is 0

    def of(self, available_bytes: int) -> int:
        """Return `size_bytes`, or the share of `available_bytes` in bytes if `size_bytes` is 0."""
        return self.size_bytes or round(self.share * available_bytes)


class _Limits(Struct, frozen=True):
    gpus: tuple[Device, ...] = ()
    budget_bytes: int | None = None
    confidence: float | None = None
    headroom: Headroom = Headroom(share=0.05)


class CheckJob(Struct, frozen=True):
    """A job in `[tool.planner]`, with the GPUs and the budget that it must fit."""

    name: str
    where: str  # file, line and key, for messages
    line: int  # of its heading
    job: Job
    batch: int
    devices: tuple[Device | None, ...]  # None stands for any GPU, for a job with a budget alone
    budget_bytes: int | None  # a bound on the memory of the process
    confidence: float | None  # None if it is not given
    headroom: Headroom
    alloc_conf: str | None = None
    allocator_cap_mib: int | None = None


class CheckConfig(Struct, frozen=True):
    """The jobs in `[tool.planner]` of a file, and the mildest verdict that fails the check."""

    path: Path
    fail_on: FailOn | None
    jobs: tuple[CheckJob, ...]


def find_config(start: Path) -> Path:
    """Return the path of the nearest pyproject.toml with `[tool.planner]` in `start` or its parents.

    Raises UsageError if there is none.
    """
    for folder in (start, *start.parents):
        path = folder / CONFIG_NAME
        if path.is_file() and _read(path) is not None:
            return path
    raise UsageError(
        f"no {CONFIG_NAME} with [tool.planner] in {start} or above; write one, or name it with --config FILE"
    )


def load_config(path: Path, catalogue: Mapping[str, CatalogueEntry], sources: Collection[str]) -> CheckConfig:
    """Read the jobs and `fail_on` of `[tool.planner]` from a pyproject.toml.

    Raises UsageError if the table is missing, and with file, line and key if it is invalid. A model
    FILE.py:NAME, which would run code, is invalid unless `sources` contains "file".
    """
    top = _read(path)
    if top is None:
        raise UsageError(f"{path}: there is no [tool.planner]; docs/check.md shows one")
    try:
        parts = top.children(("jobs",), (*_LIMITS, "fail_on"))
        limits = _limits(parts, _Limits())
        fail_on = parts["fail_on"].convert(FailOn) if "fail_on" in parts else None
        entries = parts["jobs"].mapping()
        if not entries:
            raise parts["jobs"].broken("expected a job, such as [tool.planner.jobs.train]")
        jobs = tuple(_job(name, entry, limits, catalogue, sources) for name, entry in entries.items())
    except DataFileError as error:
        raise UsageError(str(error)) from error
    return CheckConfig(path, fail_on, jobs)


def _read(path: Path) -> Entry | None:
    try:
        return read_toml_table(path, TABLE)
    except DataFileError as error:
        raise UsageError(str(error)) from error


def _job(
    name: str,
    entry: Entry,
    limits: _Limits,
    catalogue: Mapping[str, CatalogueEntry],
    sources: Collection[str],
) -> CheckJob:
    more = ("model_arg", "alloc_conf", "allocator_cap_mib", *_LIMITS)
    parts = entry.children(("model",), ("batch", *more, *OPTION_KEYS))
    options = read_options(parts, sources)
    if "model_arg" in parts:
        options["model_args"] = read_arguments(parts["model_arg"])
    job = read_model(parts["model"], catalogue, sources, **options)
    limits = _limits(parts, limits)
    if not limits.gpus and limits.budget_bytes is None:
        raise entry.broken('missing gpus or budget, such as gpus = ["RTX 4090"] or budget = "16GiB"')
    cap = parts.get("allocator_cap_mib")
    return CheckJob(
        name,
        f"{entry.path} line {entry.line}, {entry.key}",
        entry.line,
        job,
        _batch(entry, parts, catalogue),
        limits.gpus or (None,),
        limits.budget_bytes,
        limits.confidence,
        limits.headroom,
        read_alloc_conf(parts["alloc_conf"]) if "alloc_conf" in parts else None,
        None if cap is None else read_count(cap, LARGEST_TOTAL_MIB, 2),
    )


def _batch(entry: Entry, parts: Mapping[str, Entry], catalogue: Mapping[str, CatalogueEntry]) -> int:
    """Return the batch size that a job sets, or else the catalogue's batch size for its model."""
    if "batch" in parts:
        return read_count(parts["batch"], LARGEST_BATCH)
    known = catalogue.get(parts["model"].text())
    if known is None:
        raise entry.broken("missing batch, such as batch = 32")
    return known.batch


def _limits(parts: Mapping[str, Entry], default: _Limits) -> _Limits:
    """Return a table's GPUs, budget, confidence and headroom, with values of `default` for missing keys."""
    confidence = default.confidence
    if "confidence" in parts:
        confidence = parts["confidence"].convert(float)
        parse_entry(parts["confidence"], check_confidence, confidence)
    return _Limits(
        tuple(_devices(parts["gpus"])) if "gpus" in parts else default.gpus,
        _budget(parts["budget"]) if "budget" in parts else default.budget_bytes,
        confidence,
        _headroom(parts["headroom"]) if "headroom" in parts else default.headroom,
    )


def _devices(entry: Entry) -> Iterator[Device]:
    seen = set()
    for item in read_items(entry):
        try:
            number = type(item.plain()) is int
            device = (
                generic_device(read_count(item, LARGEST_TOTAL_MIB)) if number else find_device(item.text())
            )
        except UsageError as error:
            raise item.broken(str(error)) from None
        if device.name in seen:
            raise item.broken(f"{device.name} occurs twice; remove one")
        seen.add(device.name)
        yield device


def _budget(entry: Entry) -> int:
    size = parse_entry(entry, parse_size, entry.text())
    if not size.size_bytes:
        raise entry.broken("expected a size that is not 0, such as 16GiB")
    return size.size_bytes


def _headroom(entry: Entry) -> Headroom:
    size = parse_entry(entry, parse_size, entry.text())
    if size.share >= 1:
        raise entry.broken("expected less than 100%")
    return size


def parse_size(text: str, where: str = "") -> Headroom:
    """Parse a size such as 16GiB, or a share such as 5%, to a `Headroom`.

    Raises UsageError with a message that begins with `where` if the text is neither.

    >>> parse_size("1.5GiB").size_bytes, parse_size("5%").share
    (1610612736, 0.05)
    """
    matched = _SIZE.fullmatch(text.strip())
    if matched is None:
        raise UsageError(f"{where}expected a size such as 16GiB, 500MiB or 5%, got {shown(text)}")
    number, unit = float(matched[1]), matched[2]
    return Headroom(share=number / 100) if unit == "%" else Headroom(round(number * _UNITS[unit]))
