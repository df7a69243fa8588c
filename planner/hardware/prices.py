"""Read the prices of instances with GPUs from a file in the schema of SkyPilot's catalogues.

The planner ships no prices, since they change; each answer names the file of its prices and their date.
"""

import csv
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, date, datetime
from math import isfinite
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from planner._support.bounded_read import MIB, read_text
from planner.errors import DataFileError, UsageError
from planner.hardware.database import device_key
from planner.hardware.scheduler_names import load_names

REQUIRED = ("InstanceType", "AcceleratorName", "AcceleratorCount", "Price")
_DATE = re.compile(r"(?<!\d)(20\d\d-[01]\d-[0-3]\d)(?!\d)")


class Offer(NamedTuple):
    """A cloud instance with GPUs, and its price."""

    price: float  # of the whole instance, US dollars per hour
    instance: str
    gpus: int
    place: str  # the zone if the file names one, else the region

    @property
    def price_of_gpu(self) -> float:
        """Return the price per GPU in US dollars per hour."""
        return self.price / self.gpus


class PriceList(Struct, frozen=True):
    """The cheapest instance for each GPU, from one file of prices."""

    file: str
    date: date
    date_source: str  # the place from which the date was read
    is_spot: bool
    offers: Mapping[str, Offer]  # by the GPU's name in the database
    unknown: tuple[str, ...]  # accelerators that the database does not have

    def sentence(self) -> str:
        """Return a phrase on the prices: their date, its source, the file, and "spot" or "on demand"."""
        kind = "spot" if self.is_spot else "on demand"
        return f"prices of {self.date.isoformat()} ({self.date_source}) from {self.file}, {kind}"


def read_prices(path: Path, given_date: str | None = None, is_spot: bool = False) -> PriceList:
    """Read a file of prices, and return the cheapest instance with each GPU of the database.

    The date is `given_date`, else it is read from a comment at the top of the file or from the file's name,
    else it is the day of the file's last change. Raises DataFileError with the line, and UsageError for an
    invalid `given_date`.
    """
    try:
        text = read_text(path, 64 * MIB, "utf-8-sig")
        changed = datetime.fromtimestamp(path.stat().st_mtime, UTC).date()
    except OSError as error:
        raise DataFileError(f"{path}: not readable ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise DataFileError(f"{path}: not readable ({error.reason})") from error
    when, source = _dated(path, text, changed, given_date)
    gpus = {device_key(name): gpu for gpu, names in load_names("skypilot").items() for name in names}
    offers: dict[str, Offer] = {}
    unknown: set[str] = set()
    for accelerator, offer in _rows(path, text, "SpotPrice" if is_spot else "Price"):
        gpu = gpus.get(device_key(accelerator))
        if gpu is None:
            unknown.add(accelerator)
        elif offer is not None:
            offers[gpu] = min(offers.get(gpu, offer), offer)
    return PriceList(path.name, when, source, is_spot, offers, tuple(sorted(unknown)))


def _dated(path: Path, text: str, changed: date, given: str | None) -> tuple[date, str]:
    """Return the date of a price list, and a phrase that names its source."""
    if given is not None:
        found = _day(given)
        if found is None or _DATE.fullmatch(given) is None:
            raise UsageError(f"--prices-date {given}: give the day as 2026-01-31")
        return found, "--prices-date"
    comments = "\n".join(line for line in text.splitlines()[:20] if line.startswith("#"))
    for where, place in ((comments, "as the file says"), (path.name, "of its name")):
        found = _day(where)
        if found is not None:
            return found, place
    return changed, "its last change"


def _day(text: str) -> date | None:
    match = _DATE.search(text)
    try:
        return date.fromisoformat(match[1]) if match else None
    except ValueError:
        return None


def _rows(path: Path, text: str, column: str) -> Iterator[tuple[str, Offer | None]]:
    """Yield the accelerator and the offer of each row with whole GPUs; the offer is None without a price."""
    lines = ("" if line.startswith("#") else line for line in text.splitlines())
    reader = csv.reader(lines, strict=True)
    names: list[str] = []
    try:
        for row in reader:
            if not row:
                continue
            if not names:
                names = _header(path, reader.line_num, row, column)
                continue
            if len(row) != len(names):
                problem = f"{len(row)} values, but {len(names)} columns"
                raise DataFileError(f"{path} line {reader.line_num}: {problem}")
            fields = dict(zip(names, row, strict=True))
            if fields["AcceleratorName"]:
                yield from _offer(f"{path} line {reader.line_num}", fields, column)
    except csv.Error as error:
        raise DataFileError(f"{path} line {reader.line_num}: not CSV ({error})") from error
    if not names:
        raise DataFileError(f"{path}: empty; expected the columns {', '.join(REQUIRED)}")


def _header(path: Path, line: int, row: list[str], column: str) -> list[str]:
    missing = [name for name in dict.fromkeys((*REQUIRED, column)) if name not in row]
    if missing:
        problem = f"missing column {', '.join(missing)}; this is the schema of SkyPilot's catalogues"
        raise DataFileError(f"{path} line {line}: {problem}")
    if len(set(row)) != len(row):
        raise DataFileError(f"{path} line {line}: a column occurs twice")
    return row


def _offer(where: str, fields: Mapping[str, str], column: str) -> Iterator[tuple[str, Offer | None]]:
    count = _number(where, "AcceleratorCount", fields["AcceleratorCount"])
    if count < 1:
        return  # a part of a GPU, whose memory is a part too
    if count != int(count):
        raise DataFileError(f"{where}, AcceleratorCount: {fields['AcceleratorCount']} is no number of GPUs")
    if not fields[column]:
        yield fields["AcceleratorName"], None
        return
    price = _number(where, column, fields[column])
    place = fields.get("AvailabilityZone") or fields.get("Region") or ""
    yield fields["AcceleratorName"], Offer(price, fields["InstanceType"], int(count), place)


def _number(where: str, column: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not (isfinite(value) and value >= 0):
        raise DataFileError(f"{where}, {column}: expected a number from 0, got {text!r}")
    return value
