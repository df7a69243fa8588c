"""What the accuracy report says of many rows at once: errors, outcomes, and the bars that were set."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.accuracy.rows import DIES, LIVES, Row
from benchmarks.accuracy.rows_published import CAPS, CNNS, TRANSFORMERS, pairs


@dataclass(frozen=True, slots=True)
class Errors:
    """Signed relative errors of one estimator over some rows."""

    count: int
    median: float
    median_absolute: float
    high_absolute: float  # 95th percentile
    worst: float  # the largest by size, with its sign

    @property
    def cells(self) -> str:
        """Five cells of a Markdown table."""
        return (
            f"{self.count} | {percent(self.median)} | {self.median_absolute:.2%} | "
            f"{self.high_absolute:.1%} | {percent(self.worst, 1)}"
        )


def percent(share: float, digits: int = 2) -> str:
    """Signed; nothing has no sign."""
    text = f"{share:+.{digits}%}"
    return text.lstrip("+-") if float(text[1:-1]) == 0 else text


def errors_of(rows: Iterable[Row], who: str) -> Errors | None:
    """Over the rows for which the estimator says something; None where there are none."""
    found = [error for row in rows if (error := row.error(who)) is not None]
    if not found:
        return None
    absolute = np.abs(found)
    return Errors(
        len(found),
        float(np.median(found)),
        float(np.median(absolute)),
        float(np.quantile(absolute, 0.95)),
        max(found, key=abs),
    )


def right_of(rows: Iterable[Row], who: str) -> tuple[int, int] | None:
    """How many outcomes an estimator calls right, and of how many."""
    found = [is_right for row in rows if (is_right := row.is_right(who)) is not None]
    return (sum(found), len(found)) if found else None


def inside(rows: Sequence[Row], who: str) -> tuple[int, int]:
    """How many of timm's brackets an estimator lies in, and how many there are."""
    found = [one.is_right(who) and two.is_right(who) for one, two in pairs(list(rows))]
    return sum(bool(is_inside) for is_inside in found), len(found)


def inside_at(rows: Sequence[Row], limit_mib: float) -> int:
    """How many of timm's brackets hold the planner's answer with this much memory for the allocator."""
    return sum(
        one.needed_mib is not None
        and two.needed_mib is not None
        and one.needed_mib <= limit_mib < two.needed_mib
        for one, two in pairs(list(rows))
    )


def deaths_at_estimate(rows: Sequence[Row], who: str = "planner") -> dict[str, int]:
    """Whether runs would die under a cap at our peak reserved, as the published outcomes under caps tell.

    `dies`: the run died under a cap as large or larger. `lives`: it lived under one as small or smaller.
    `either`: the same run did both. `not told`: the estimate lies between.
    """
    by_run: dict[str, list[Row]] = {}
    for row in rows:
        if row.source == CAPS:
            by_run.setdefault(row.case.partition(" under ")[0], []).append(row)
    told = {"lives": 0, "dies": 0, "either": 0, "not told": 0}
    for row in rows:
        if row.source not in (CNNS, TRANSFORMERS):
            continue
        estimate = float(row.said["no_set_up" if row.source == CNNS else who])
        caps = by_run.get(row.case, [])
        died = any(cap.truth == DIES and (cap.limit_mib or 0) >= estimate for cap in caps)
        lived = any(cap.truth == LIVES and (cap.limit_mib or 0) <= estimate for cap in caps)
        verdict = {(True, False): "dies", (False, True): "lives", (True, True): "either"}
        told[verdict.get((died, lived), "not told")] += 1
    return told


@dataclass(frozen=True, slots=True)
class Bar:
    """What was asked for, and what came out."""

    asked: str
    found: str
    is_reached: bool


def bars(rows: Sequence[Row]) -> list[Bar]:
    """The bars of the report, each with what is reached."""
    cnns, both = ([row for row in rows if row.source in kinds] for kinds in ((CNNS,), (CNNS, TRANSFORMERS)))
    one, every = errors_of(cnns, "planner"), errors_of(both, "planner")
    deaths = deaths_at_estimate(rows)
    told = sum(deaths.values())
    right, capped = right_of((row for row in rows if row.source == CAPS), "planner") or (0, 1)
    held, brackets = inside(rows, "planner")
    vgg = [row for row in rows if row.model == "vgg16_bn" and row.layer == "B"]
    found = []
    if one is not None and every is not None:
        found += [
            _at_most(
                "published CNNs, fp32: median absolute error of the peak", one.median_absolute, 0.015, 2
            ),
            _at_most("CNNs and transformers: median absolute error", every.median_absolute, 0.02, 2),
            _at_most("CNNs and transformers: 95th percentile", every.high_absolute, 0.08, 1),
            _at_most(
                f"runs that would die at the estimate ({deaths['dies']} of {told}; "
                f"{deaths['either']} more did both, {deaths['not told']} are not told)",
                deaths["dies"] / told,
                0.05,
                1,
            ),  # fmt: skip
        ]
    found.append(
        _at_least(f"outcomes under allocator caps called right ({right} of {capped})", right / capped, 0.95)
    )
    if vgg:
        found.append(
            _at_most("VGG16-BN of the notebook: peak allocated", abs(vgg[0].error("planner") or 0), 0.01, 2)
        )
    if brackets:
        found.append(_at_least(f"timm's brackets inside ({held} of {brackets})", held / brackets, 0.93))
    return found


def _at_most(what: str, value: float, bar: float, digits: int) -> Bar:
    return Bar(f"{what}: at most {bar:.1%}", f"{value:.{digits}%}", value <= bar)


def _at_least(what: str, value: float, bar: float) -> Bar:
    return Bar(f"{what}: at least {bar:.0%}", f"{value:.1%}", value >= bar)
