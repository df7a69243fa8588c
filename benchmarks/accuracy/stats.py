"""Statistics over rows of the accuracy report: errors, outcomes, and the bars that were set."""

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
        """The errors as five cells of a Markdown table."""
        return (
            f"{self.count} | {percent(self.median)} | {self.median_absolute:.2%} | "
            f"{self.high_absolute:.1%} | {percent(self.worst, 1)}"
        )


def percent(share: float, digits: int = 2) -> str:
    """Format a share with its sign; zero has none."""
    text = f"{share:+.{digits}%}"
    return text.lstrip("+-") if float(text[1:-1]) == 0 else text


def errors_of(rows: Iterable[Row], estimator: str) -> Errors | None:
    """Return the errors over the rows that the estimator answers; None if there are none."""
    errors = [error for row in rows if (error := row.error(estimator)) is not None]
    if not errors:
        return None
    absolute = np.abs(errors)
    return Errors(
        len(errors),
        float(np.median(errors)),
        float(np.median(absolute)),
        float(np.quantile(absolute, 0.95)),
        max(errors, key=abs),
    )


def right_of(rows: Iterable[Row], estimator: str) -> tuple[int, int] | None:
    """Count the outcomes that an estimator calls right, and all that it answers."""
    verdicts = [is_right for row in rows if (is_right := row.is_right(estimator)) is not None]
    return (sum(verdicts), len(verdicts)) if verdicts else None


def inside(rows: Sequence[Row], estimator: str) -> tuple[int, int]:
    """Count timm's brackets that an estimator lies in, and all of them."""
    verdicts = [all(row.is_right(estimator) for row in bracket) for bracket in pairs(list(rows))]
    return sum(verdicts), len(verdicts)


def inside_at(rows: Sequence[Row], limit_mib: float) -> int:
    """Count timm's brackets that hold the planner's answer with this much memory for the allocator."""
    return sum(
        trained.needed_mib is not None
        and failed.needed_mib is not None
        and trained.needed_mib <= limit_mib < failed.needed_mib
        for trained, failed in pairs(list(rows))
    )


def deaths_at_estimate(rows: Sequence[Row], estimator: str = "planner") -> dict[str, int]:
    """Count the runs that would die under a cap at our peak reserved, by the published outcomes under caps.

    `dies`: the run died under a cap as large or larger. `lives`: it lived under one as small or smaller.
    `either`: the same run did both. `undecided`: the estimate lies between.
    """
    by_run: dict[str, list[Row]] = {}
    for row in rows:
        if row.source == CAPS:
            by_run.setdefault(row.case.partition(" under ")[0], []).append(row)
    counts = {"lives": 0, "dies": 0, "either": 0, "undecided": 0}
    for row in rows:
        if row.source not in (CNNS, TRANSFORMERS):
            continue
        estimate = float(row.estimates["no_set_up" if row.source == CNNS else estimator])
        caps = by_run.get(row.case, [])
        died = any(cap.truth == DIES and (cap.limit_mib or 0) >= estimate for cap in caps)
        lived = any(cap.truth == LIVES and (cap.limit_mib or 0) <= estimate for cap in caps)
        verdict = {(True, False): "dies", (False, True): "lives", (True, True): "either"}
        counts[verdict.get((died, lived), "undecided")] += 1
    return counts


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar that was set, and the value reached."""

    condition: str
    value: str
    is_reached: bool


def bars(rows: Sequence[Row]) -> list[Bar]:
    """Return the bars of the report, each with its value."""
    cnns, both = ([row for row in rows if row.source in kinds] for kinds in ((CNNS,), (CNNS, TRANSFORMERS)))
    cnns_off, all_errors = errors_of(cnns, "planner"), errors_of(both, "planner")
    deaths = deaths_at_estimate(rows)
    runs = sum(deaths.values())
    right, capped = right_of((row for row in rows if row.source == CAPS), "planner") or (0, 1)
    held, brackets = inside(rows, "planner")
    vgg = [row for row in rows if row.model == "vgg16_bn" and row.layer == "B"]
    result = []
    if cnns_off is not None and all_errors is not None:
        result += [
            _at_most(
                "published CNNs, fp32: median absolute error of the peak", cnns_off.median_absolute, 0.015, 2
            ),
            _at_most("CNNs and transformers: median absolute error", all_errors.median_absolute, 0.02, 2),
            _at_most("CNNs and transformers: 95th percentile", all_errors.high_absolute, 0.08, 1),
            _at_most(
                f"runs that would die at the estimate ({deaths['dies']} of {runs}; "
                f"{deaths['either']} more did both, {deaths['undecided']} are undecided)",
                deaths["dies"] / runs,
                0.05,
                1,
            ),  # fmt: skip
        ]
    result.append(
        _at_least(f"outcomes under allocator caps called right ({right} of {capped})", right / capped, 0.95)
    )
    if vgg:
        result.append(
            _at_most("VGG16-BN of the notebook: peak allocated", abs(vgg[0].error("planner") or 0), 0.01, 2)
        )
    if brackets:
        result.append(_at_least(f"timm's brackets inside ({held} of {brackets})", held / brackets, 0.93))
    return result


def _at_most(quantity: str, value: float, bar: float, digits: int) -> Bar:
    return Bar(f"{quantity}: at most {bar:.1%}", f"{value:.{digits}%}", value <= bar)


def _at_least(quantity: str, value: float, bar: float) -> Bar:
    return Bar(f"{quantity}: at least {bar:.0%}", f"{value:.1%}", value >= bar)
