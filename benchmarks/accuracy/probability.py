"""Calibration of the probabilities: of the runs with stated probability p of death, a share p dies.

Each run is judged by a distribution fitted without its model (of timm's, without its whole family). Each job
counts once: repetitions of a job under caps that lie close are not independent.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec.structs import replace
from scipy.stats import beta

from benchmarks.accuracy.kinds import (
    GROUPS,
    between_kinds,
    judged_outcomes_of,
    kind_spread,
    likelihoods_of,
    outcomes_of,
    peak_count,
    peak_ratio,
    peak_ratios,
    peak_rows,
    spread_of,
)
from benchmarks.accuracy.rows import DIES, Row
from benchmarks.accuracy.rows_calibrated import CALIBRATED
from benchmarks.accuracy.rows_published import TIMM
from benchmarks.accuracy.texts import OUTSIDE, PROBABILITY, UNPUBLISHED
from benchmarks.published.timm_brackets import OTHER_OUTSIDE_MIB, OUTSIDE_MIB
from planner.hardware.oom_probability import probability_beyond
from planner.hardware.residuals import RunKind, Spread, quantile

EDGES = (0, 0.01, 0.1, 0.5, 0.9, 0.99, 1.0001)
CONFIDENCES = tuple(np.linspace(0.02, 0.99, 98))
INTERVAL = 0.95
JUDGED = tuple(kind for kind, group in GROUPS.items() if group.outcomes or group.judged)
# How each kind differs from that of plain CNNs, as planner/hardware/likeness.py counts it.
DEPARTURES: Mapping[RunKind, int] = {RunKind.BENCHMARK: 2, RunKind.BENCHMARK_LAST: 3, RunKind.TEXTS: 1}
# Outside of the allocator others measured 1,690 MiB for CNNs on timm's stack and 1,024 for transformers, and
# here these begin with a convolution too: the deviation of what lies evenly between the two.
OUTSIDE_SPREAD_MIB = (OUTSIDE_MIB - OTHER_OUTSIDE_MIB[0]) / 12**0.5


@dataclass(frozen=True, slots=True)
class Judged:
    """An outcome, the probability stated for its death, and the job that it counts for."""

    stated: float
    died: bool
    job: str


@dataclass(frozen=True, slots=True)
class Bin:
    """Jobs of about the same stated probability."""

    stated: float  # mean
    observed: float  # share that died
    low: float  # of the interval of that share (Jeffreys)
    high: float
    count: int  # jobs
    outcomes: int

    @property
    def is_honest(self) -> bool:
        """True if the stated probability lies within the interval of the observed share."""
        return self.low <= self.stated <= self.high


def chance(row: Row, spread: Spread, deviation_mib: float = 0.0) -> float:
    """Return the probability that a run dies, with a deviation of its allocator's memory."""
    return probability_beyond(row.limit_mib or 0, row.needed_mib or 0, spread, deviation_mib)


def judged(rows: Sequence[Row], kind: RunKind) -> list[Judged]:
    """Return the outcomes of a kind, each judged without its model or family."""
    if unseen := judged_outcomes_of(rows, kind):
        spread = kind_spread(rows, kind)
        return [
            Judged(chance(row, spread, OUTSIDE_SPREAD_MIB), row.truth == DIES, _job_of(row)) for row in unseen
        ]
    outcomes = outcomes_of(rows, kind)
    likelihoods = likelihoods_of(outcomes)
    whole = likelihoods.sum(0)
    unit = [row.family if row.source == TIMM else row.model for row in outcomes]
    spreads = {}
    for name in set(unit):
        places = [place for place, other in enumerate(unit) if other == name]
        spreads[name] = spread_of(whole - likelihoods[places].sum(0), len(outcomes) - len(places))
    return [
        Judged(chance(row, spreads[name]), row.truth == DIES, _job_of(row))
        for row, name in zip(outcomes, unit, strict=True)
    ]


def judged_as_unpublished(rows: Sequence[Row], kind: RunKind) -> list[Judged]:
    """Return the outcomes of a kind, judged by plain CNNs' spread with departures alone."""
    plain = kind_spread(rows, RunKind.CONVOLUTIONS)
    widening = between_kinds(rows, without=kind) * np.sqrt(DEPARTURES[kind])
    wide = replace(plain, scale=float(np.hypot(plain.scale, widening)))
    return [Judged(chance(row, wide), row.truth == DIES, _job_of(row)) for row in outcomes_of(rows, kind)]


def _job_of(row: Row) -> str:
    """Name model, optimizer, batch and GPU of a run under caps; of timm's, the model."""
    return row.model if row.source == TIMM else row.case.partition(" (")[0] + row.gpu


def bins_of(everything: Sequence[Judged]) -> list[Bin]:
    """Return stated against observed, by the stated probability."""
    bins = []
    for low, high in zip(EDGES[:-1], EDGES[1:], strict=True):
        jobs: dict[str, list[Judged]] = {}
        for one in everything:
            if low <= one.stated < high:
                jobs.setdefault(one.job, []).append(one)
        if jobs:
            bins.append(_bin(list(jobs.values())))
    return bins


def _bin(jobs: Sequence[Sequence[Judged]]) -> Bin:
    count = len(jobs)
    stated = float(np.mean([np.mean([one.stated for one in job]) for job in jobs]))
    deaths = float(sum(np.mean([one.died for one in job]) for job in jobs))
    tail = (1 - INTERVAL) / 2
    low, high = beta.ppf([tail, 1 - tail], deaths + 0.5, count - deaths + 0.5)
    share = deaths / count
    return Bin(stated, share, min(float(low), share), max(float(high), share), count, sum(map(len, jobs)))


def reliability(rows: Sequence[Row]) -> dict[RunKind, list[Bin]]:
    """Return stated against observed deaths of every kind that has outcomes."""
    return {kind: bins_of(judged(rows, kind)) for kind in JUDGED}


def coverage_curves(rows: Sequence[Row]) -> dict[str, tuple[list[float], list[float]]]:
    """Return confidences of the upper bound of a peak, and the shares of peaks within it, models left out."""
    curves = {}
    for kind in (RunKind.CONVOLUTIONS, RunKind.TEXTS):
        rows_of_kind = peak_rows(rows, kind)
        if not rows_of_kind:
            continue
        others = {model: peak_ratios(rows, kind, model) for model in {row.model for row in rows_of_kind}}
        seen = [
            float(np.mean([peak_ratio(row) <= quantile(others[row.model], share) for row in rows_of_kind]))
            for share in CONFIDENCES
        ]
        curves[f"{kind} ({len(rows_of_kind)})"] = (list(CONFIDENCES), seen)
    reached = [float(text) for row in rows if (text := row.estimates.get("bound_confidence"))]
    if reached:
        held = [float(np.mean(np.array(reached) <= share)) for share in CONFIDENCES]
        curves[f"{CALIBRATED} ({len(reached)})"] = (list(CONFIDENCES), held)
    return curves


def calibration_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the section of the report."""
    yield "## Is the probability honest?\n"
    yield PROBABILITY
    yield "![Stated against observed](accuracy_probability.png)\n"
    yield "| kind | outcomes | peaks | mean, less 1 | deviation | runs |"
    yield "|---|--:|--:|--:|--:|---|"
    for kind, group in GROUPS.items():
        spread, peaks = kind_spread(rows, kind), peak_count(rows, kind)
        yield (
            f"| {kind} | {spread.outcomes} | {peaks} | {spread.location:+.2%} | "
            f"{spread.scale:.2%} | {group.runs} |"
        )
    yield f"\nBetween kinds and GPUs the means deviate by {between_kinds(rows):.2%}.\n"
    yield from _table_of(reliability(rows))
    yield OUTSIDE
    yield UNPUBLISHED
    yield from _table_of({kind: bins_of(judged_as_unpublished(rows, kind)) for kind in DEPARTURES})


def _table_of(by_kind: Mapping[RunKind, Sequence[Bin]]) -> Iterator[str]:
    yield "| kind | stated, mean | died | 95 % interval | jobs | outcomes | |"
    yield "|---|--:|--:|--:|--:|--:|---|"
    for kind, bins in by_kind.items():
        for one in bins:
            yield (
                f"| {kind} | {one.stated:.1%} | {one.observed:.1%} | {one.low:.1%} to {one.high:.1%} | "
                f"{one.count} | {one.outcomes} | {'' if one.is_honest else '**outside**'} |"
            )
    yield ""
