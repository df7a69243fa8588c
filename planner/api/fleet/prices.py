"""Read the prices and throughput of GPUs for `planner gpus`."""

import csv
from collections.abc import Mapping, Sequence
from math import inf, isfinite
from os import PathLike
from pathlib import Path

from planner._support.bounded_read import MIB, read_text
from planner.errors import DataFileError, UsageError
from planner.hardware import PriceList, find_device, read_prices
from planner.planning import Quote

Throughput = str | Mapping[str, float] | Sequence[str]

_COLUMNS = ("gpu", "samples_per_second")


def open_prices(
    prices: str | PathLike[str] | None, prices_date: str | None, spot: bool | None
) -> PriceList | None:
    """Return the prices in a file, or None if no file is given. Raises DataFileError or UsageError."""
    if prices is None:
        for flag, given in (("--prices-date", prices_date), ("--spot", spot)):
            if given:
                raise UsageError(f"{flag}: give the prices as well, --prices FILE.csv")
        return None
    return read_prices(Path(prices), prices_date, bool(spot))


def read_throughput(given: Throughput | None) -> dict[str, float]:
    """Return the given samples per second by GPU name, or {} if none are given.

    They are given as texts GPU=NUMBER, as files, or as a mapping. Files have the columns gpu and
    samples_per_second. Raises DataFileError with the line, or UsageError.
    """
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return {find_device(name).name: _rate("throughput", str(rate)) for name, rate in given.items()}
    rates: dict[str, float] = {}
    for text in [given] if isinstance(given, str) else given:
        name, is_pair, rate = text.rpartition("=")
        if is_pair:
            rates[find_device(name).name] = _rate(f"--throughput {text}", rate)
        elif text.endswith(".csv"):
            rates |= _read_file(Path(text))
        else:
            raise UsageError(f"--throughput {text}: give GPU=SAMPLES_PER_SECOND or a file FILE.csv")
    return rates


def _rate(where: str, text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not (isfinite(rate) and rate > 0):
        raise UsageError(f"{where}: expected samples a second, more than 0, got {text!r}")
    return rate


def _read_file(path: Path) -> dict[str, float]:
    try:
        lines = read_text(path, 64 * MIB, "utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataFileError(f"{path}: not readable ({reason})") from error
    rates: dict[str, float] = {}
    rows = [(number, row) for number, row in enumerate(csv.reader(lines), start=1) if row]
    if not rows or tuple(rows[0][1]) != _COLUMNS:
        raise DataFileError(f"{path} line 1: expected the columns {','.join(_COLUMNS)}")
    for number, row in rows[1:]:
        where = f"{path} line {number}"
        if len(row) != len(_COLUMNS):
            raise DataFileError(f"{where}: {len(row)} values, but {len(_COLUMNS)} columns")
        try:
            name, rate = find_device(row[0]).name, _rate(where, row[1])
        except UsageError as error:
            raise DataFileError(f"{where}: {error}".replace(f"{where}: {where}", where)) from error
        if name in rates:
            raise DataFileError(f"{where}: {name} occurs twice")
        rates[name] = rate
    return rates


def quotes_of(prices: PriceList | None, rates: Mapping[str, float]) -> dict[str, Quote]:
    """Return the quotes of GPUs that have a price or a throughput, by GPU name."""
    offers = {} if prices is None else prices.offers
    return {name: Quote(offers.get(name), rates.get(name)) for name in {*offers, *rates}}


def price_key(quotes: Mapping[str, Quote], name: str, by_cost: bool) -> float:
    """Return a GPU's price or, with `by_cost`, its cost per million samples; infinity if unknown."""
    quote = quotes.get(name)
    value = None if quote is None else quote.per_million_samples if by_cost else quote.price
    return inf if value is None else value
