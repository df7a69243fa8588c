"""From the rows of accuracy.csv to planner/residuals.json, and whether the distributions in it are honest.

A run under a cap dies if it needs more than the cap. (What it needs) / (what its replay needs) is taken as
normal; its two parameters are what the published outcomes make likely. Honest means: of the
runs that are told to die with probability p, a share p dies. Each model's runs are judged with a distribution
that was fitted to the other models' alone.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from accuracy_calibrated import CALIBRATED
from accuracy_published import CAPS, CNNS, TIMM, TRANSFORMERS
from accuracy_rows import DIES, Row
from accuracy_texts import PROBABILITY
from scipy.stats import beta, norm
from timm_brackets import OTHER_OUTSIDE_MIB, OUTSIDE_MIB

from planner.budget import chance_beyond
from planner.residuals import RESIDUALS_FILE, Kind, Spread, quantile

FAMILIES = {Kind.FIXED: ("cnn", CNNS), Kind.TEXTS: ("transformer", TRANSFORMERS)}
# Evenly counted at first: means from -6 to 6 %, deviations by their logarithm from 0.2 to 10 %.
MEANS = np.linspace(-0.06, 0.06, 121)
SCALES = np.geomspace(0.002, 0.1, 80)
EDGES = (0, 0.005, 0.05, 0.25, 0.5, 0.75, 0.95, 0.995, 1.0001)
CONFIDENCES = tuple(np.linspace(0.02, 0.99, 98))
OUTSIDE_SPREAD_MIB = (OUTSIDE_MIB - min(OTHER_OUTSIDE_MIB)) / np.sqrt(12)  # as if evenly between the figures
ABOUT = (
    "Written by benchmarks/accuracy.py from benchmarks/accuracy.csv: published runs without any calibration. "
    "verdicts: normal distribution of (memory needed) / (memory that the replay needs), less 1, as likely as "
    "the outcomes under allocator caps make it. peak_ratios: process peaks on an empty card over replayed "
    "peak reserved, model and optimizer on both sides."
)


def outcomes_of(rows: Sequence[Row], family: str) -> list[Row]:
    """The outcomes under caps of one family."""
    return [row for row in rows if row.source == CAPS and row.family == family and row.needed_mib]


def fit_spread(rows: Sequence[Row]) -> Spread:
    """What these outcomes say of the next one: the mean and the deviation of the normal distributions, each
    counted by how likely it makes the outcomes; doubt about the mean widens the deviation.

    The most likely distribution alone would promise too much, since few outcomes lie near a replay's need.
    """
    ratios = np.array([(row.limit_mib or 0) / (row.needed_mib or 1) for row in rows])
    died = np.array([row.truth == DIES for row in rows])
    signed = np.where(died, -1.0, 1.0) * (ratios - 1)
    sign = np.where(died, -1.0, 1.0)
    likelihoods = np.array(
        [[float(np.sum(norm.logcdf((signed - sign * mean) / scale))) for mean in MEANS] for scale in SCALES]
    )
    weights = np.exp(likelihoods - likelihoods.max())
    weights /= weights.sum()
    location = float(weights.sum(0) @ MEANS)
    variance = float(weights.sum(1) @ SCALES**2 + weights.sum(0) @ (MEANS - location) ** 2)
    return Spread(len(rows), round(location, 5), round(float(np.sqrt(variance)), 5))


def peak_ratio(row: Row) -> float:
    """Measured over replayed, with the memory of model and optimizer on both sides."""
    whole = float(row.said.get("no_set_up", row.said["planner"]))
    return (float(row.truth) + whole - float(row.said["planner"])) / whole


def peak_ratios(rows: Sequence[Row], source: str, without: str = "") -> list[float]:
    """Those of a source, rising; without one model where it is named."""
    return sorted(peak_ratio(row) for row in rows if row.source == source and row.model != without)


def write_residuals(rows: Sequence[Row]) -> None:
    """The file that the planner reads."""
    kinds = {
        kind.value: {
            "verdicts": {
                "outcomes": (spread := fit_spread(outcomes_of(rows, family))).outcomes,
                "location": spread.location,
                "scale": spread.scale,
            },
            "peak_ratios": [round(ratio, 4) for ratio in peak_ratios(rows, source)],
        }
        for kind, (family, source) in FAMILIES.items()
    }
    text = json.dumps({"about": ABOUT, "kinds": kinds}, indent=1)
    RESIDUALS_FILE.write_text(text + "\n", encoding="utf-8")


def judged(rows: Sequence[Row]) -> Iterator[tuple[str, float, bool]]:
    """Each outcome with its name, the probability stated for its death by the other models, and its death."""
    for family, _ in FAMILIES.values():
        mine = outcomes_of(rows, family)
        for model in sorted({row.model for row in mine}):
            spread = fit_spread([row for row in mine if row.model != model])
            for row in mine:
                if row.model == model:
                    yield "caps", _chance(row, spread, 0.0), row.truth == DIES
    cnns = fit_spread(outcomes_of(rows, "cnn"))
    for row in rows:
        if row.source == TIMM and row.needed_mib:
            yield "timm", _chance(row, cnns, OUTSIDE_SPREAD_MIB), row.truth == DIES


def _chance(row: Row, spread: Spread, outside_mib: float) -> float:
    return chance_beyond(row.limit_mib or 0, row.needed_mib or 0, spread, outside_mib)


@dataclass(frozen=True, slots=True)
class Bin:
    """Outcomes of about the same stated probability."""

    stated: float  # mean
    observed: float  # share that died
    low: float  # of the 90 % interval of that share (Jeffreys)
    high: float
    count: int


def reliability(rows: Sequence[Row]) -> dict[str, list[Bin]]:
    """Stated against observed deaths."""
    found: dict[str, list[Bin]] = {}
    everything = list(judged(rows))
    for name in ("caps", "timm"):
        bins = []
        for low, high in zip(EDGES[:-1], EDGES[1:], strict=True):
            mine = [
                (stated, died) for who, stated, died in everything if who == name and low <= stated < high
            ]
            if mine:
                deaths, count = sum(died for _, died in mine), len(mine)
                stated = float(np.mean([chance for chance, _ in mine]))
                ends = beta.ppf([0.05, 0.95], deaths + 0.5, count - deaths + 0.5)
                low_end, high_end = min(ends[0], deaths / count), max(ends[1], deaths / count)
                bins.append(Bin(stated, deaths / count, float(low_end), float(high_end), count))
        found[name] = bins
    return found


def coverage_curves(rows: Sequence[Row]) -> dict[str, tuple[list[float], list[float]]]:
    """Stated confidence of the upper bound of a peak, and the share of peaks within it, models left out."""
    found = {}
    for name, source in (("CNNs", CNNS), ("transformers", TRANSFORMERS)):
        mine = [row for row in rows if row.source == source]
        if not mine:
            continue
        others = {model: peak_ratios(rows, source, model) for model in {row.model for row in mine}}
        seen = [
            float(np.mean([peak_ratio(row) <= quantile(others[row.model], share) for row in mine]))
            for share in CONFIDENCES
        ]
        found[f"{name} ({len(mine)})"] = (list(CONFIDENCES), seen)
    reached = [float(text) for row in rows if (text := row.said.get("bound_confidence"))]
    if reached:
        held = [float(np.mean(np.array(reached) <= share)) for share in CONFIDENCES]
        found[f"{CALIBRATED} ({len(reached)})"] = (list(CONFIDENCES), held)
    return found


def calibration_lines(rows: Sequence[Row]) -> Iterator[str]:
    """The section of the report."""
    yield "## Is the probability honest?\n"
    yield PROBABILITY
    yield "![Stated against observed](accuracy_probability.png)\n"
    yield "| kind | outcomes | mean, less 1 | deviation |"
    yield "|---|--:|--:|--:|"
    for kind, (family, _) in FAMILIES.items():
        spread = fit_spread(outcomes_of(rows, family))
        yield f"| {kind.value} | {spread.outcomes} | {spread.location:+.2%} | {spread.scale:.2%} |"
    yield "\n| outcomes | stated, mean | died | 90 % interval | n |"
    yield "|---|--:|--:|--:|--:|"
    for name, bins in reliability(rows).items():
        for found in bins:
            yield (
                f"| {name} | {found.stated:.1%} | {found.observed:.1%} | "
                f"{found.low:.1%} to {found.high:.1%} | {found.count} |"
            )
    yield ""
