"""Fit planner/hardware/residuals.json to the rows of accuracy.csv: a distribution for each kind of runs.

A run dies if it needs more than its allocator has. (What it needs) / (what its replay needs) is taken as
normal; its two parameters are those that the published outcomes of the kind make likely.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import to_builtins
from scipy.stats import norm

from benchmarks.accuracy.rows import DIES, Row
from benchmarks.accuracy.rows_points import BERT, T4, VIT_L
from benchmarks.accuracy.rows_published import CAPS, CNNS, TIMM, TRANSFORMERS
from planner.hardware.residuals import RESIDUALS_FILE, KindSettings, RunKind, Spread

# Evenly counted at first: means from -6 to 6 %, deviations by their logarithm from 0.2 to 10 %.
MEANS = np.linspace(-0.06, 0.06, 121)
SCALES = np.geomspace(0.002, 0.1, 80)
OTHER_MODEL = "tresnet"  # timm 0.6 ran it with inplace_abn: another model than timm's today
# Three published figures of held-out runs of models with billions of parameters.
LARGE_PEAKS, LARGE_MEDIAN, LARGE_95 = 26, 0.044, 0.089
ABOUT = (
    "Written by benchmarks/accuracy from benchmarks/accuracy/accuracy.csv: published runs without any "
    "calibration. "
    "verdicts: normal distribution of (memory needed) / (memory that the replay needs), less 1, as likely as "
    "the outcomes make it. peak_ratios: process peaks on an empty card over replayed peak reserved, model "
    "and optimizer on both sides. between: standard deviation between the means of kinds and GPUs."
)
BOTH_FORMATS = ("contiguous", "channels_last")


@dataclass(frozen=True, slots=True)
class Group:
    """The sources of a kind's rows, and the settings of their training."""

    runs: str
    settings: KindSettings
    outcomes: tuple[str, ...] = ()  # sources of outcomes
    peaks: tuple[str, ...] = ()  # sources of peaks


GROUPS: Mapping[RunKind, Group] = {
    RunKind.CONVOLUTIONS: Group(
        "CNNs in float32 without cudnn.benchmark (xMem, torch 2.6, RTX 3060 and 4060)",
        KindSettings(("fp32",), (False,), ("contiguous",), ((8, 6), (8, 9))),
        (CAPS,),
        (CNNS,),
    ),
    RunKind.BENCHMARK: Group(
        "CNNs in mixed precision with cudnn.benchmark (timm, torch 1.12, RTX 3090)",
        KindSettings(("amp-fp16",), (True,), ("contiguous",), ((8, 6),)),
        (TIMM,),
    ),
    RunKind.BENCHMARK_LAST: Group(
        "CNNs in mixed precision with cudnn.benchmark and channels_last (timm, torch 1.12, RTX 3090)",
        KindSettings(("amp-fp16",), (True,), ("channels_last",), ((8, 6),)),
        (TIMM,),
    ),
    RunKind.ATTENTION: Group(
        "attention over images and equal texts, mostly in mixed precision (timm, torch 1.12, RTX 3090; peaks "
        "on A100, V100 and T4)",
        KindSettings(
            ("fp32", "amp-fp16", "amp-bf16", "bf16"),
            (False, True),
            BOTH_FORMATS,
            ((7, 0), (7, 5), (8, 0), (8, 6)),
        ),
        (TIMM,),
        (VIT_L, BERT, T4),
    ),
    RunKind.TEXTS: Group(
        "transformers in float32 on texts padded to the longest of a batch (xMem, torch 2.6, RTX 3060 and "
        "4060)",
        KindSettings(("fp32",), (False, True), BOTH_FORMATS, ((8, 6), (8, 9))),
        (CAPS,),
        (TRANSFORMERS,),
    ),
    RunKind.LARGE: Group(
        "models of billions of parameters in float32 (A100 40GB), of which only median and 95th percentile "
        "of the error are known",
        KindSettings(("fp32",), (False, True), BOTH_FORMATS, ((8, 0),)),
    ),
}


def outcomes_of(rows: Iterable[Row], kind: RunKind) -> list[Row]:
    """Return the outcomes of a kind."""
    group = GROUPS[kind]
    return [
        row
        for row in rows
        if row.kind == kind.value
        and row.source in group.outcomes
        and row.needed_mib
        and row.family != OTHER_MODEL
    ]


def likelihoods_of(rows: Sequence[Row]) -> np.ndarray:
    """Return the logarithms by row, deviation and mean."""
    ratios = np.array([(row.limit_mib or 0) / (row.needed_mib or 1) - 1 for row in rows])
    sign = np.array([-1.0 if row.truth == DIES else 1.0 for row in rows])
    away = ratios[:, None, None] - MEANS[None, None, :]
    return np.asarray(norm.logcdf(sign[:, None, None] * away / SCALES[None, :, None]))


def spread_of(likelihoods: np.ndarray, count: int) -> Spread:
    """Return the mean and the deviation of the normal distributions, each counted by its likelihood; doubt
    about the mean widens the deviation.

    The most likely distribution alone would promise too much, since few outcomes lie near a replay's need.
    """
    weights = np.exp(likelihoods - likelihoods.max())
    weights /= weights.sum()
    location = float(weights.sum(0) @ MEANS)
    variance = float(weights.sum(1) @ SCALES**2 + weights.sum(0) @ (MEANS - location) ** 2)
    return Spread(count, round(location, 5), round(float(np.sqrt(variance)), 5))


def fit_spread(rows: Sequence[Row]) -> Spread:
    """Return the distribution that these outcomes predict for the next one."""
    return spread_of(likelihoods_of(rows).sum(0), len(rows))


def kind_spread(rows: Sequence[Row], kind: RunKind) -> Spread:
    """Return the distribution of a kind; of the large models, the wider of those that two quantiles give."""
    if kind is RunKind.LARGE:
        scale = max(LARGE_MEDIAN / norm.ppf(0.75), LARGE_95 / norm.ppf(0.975))
        return Spread(0, 0.0, round(float(scale), 5))
    return fit_spread(outcomes_of(rows, kind))


def peak_ratio(row: Row) -> float:
    """Return measured over replayed, with the memory of model and optimizer on both sides."""
    whole = float(row.estimates.get("no_set_up", row.estimates["planner"]))
    return (float(row.truth) + whole - float(row.estimates["planner"])) / whole


def peak_rows(rows: Iterable[Row], kind: RunKind) -> list[Row]:
    """Return the peaks of processes, or of reserved memory, of a kind."""
    sources = GROUPS[kind].peaks
    return [row for row in rows if row.source in sources and row.kind == kind.value and row.layer in "CD"]


def peak_ratios(rows: Iterable[Row], kind: RunKind, without: str = "") -> list[float]:
    """Return the ratios of a kind, rising, without those of the model `without`."""
    return sorted(peak_ratio(row) for row in peak_rows(rows, kind) if row.model != without)


def peak_count(rows: Iterable[Row], kind: RunKind) -> int:
    """Return the number of peaks behind a kind, those included of which only quantiles are known."""
    return LARGE_PEAKS if kind is RunKind.LARGE else len(peak_rows(rows, kind))


def means(rows: Sequence[Row], without: RunKind | None = None) -> list[float]:
    """Return the mean, less 1, of each kind on each GPU, without the kind `without`."""
    values = []
    for kind in RunKind:
        outcomes = [] if kind is without else outcomes_of(rows, kind)
        for gpu in sorted({row.gpu for row in outcomes}):
            values.append(fit_spread([row for row in outcomes if row.gpu == gpu]).location)
        peaks = peak_rows(rows, kind) if kind is RunKind.ATTENTION and kind is not without else []
        for gpu in sorted({row.gpu for row in peaks}):
            values.append(float(np.mean([peak_ratio(row) for row in peaks if row.gpu == gpu])) - 1)
    return values


def write_residuals(rows: Sequence[Row]) -> None:
    """Write the file that the planner reads."""
    kinds = {}
    for kind, group in GROUPS.items():
        spread, ratios = kind_spread(rows, kind), peak_ratios(rows, kind)
        kinds[kind.value] = {
            "runs": group.runs,
            "peaks": peak_count(rows, kind),
            "settings": to_builtins(group.settings),
            "verdicts": to_builtins(spread),
            "peak_ratios": [round(ratio, 4) for ratio in ratios],
        }
    between = round(float(np.std(means(rows), ddof=1)), 5)
    text = json.dumps({"about": ABOUT, "between": between, "kinds": kinds}, indent=1)
    RESIDUALS_FILE.write_text(text + "\n", encoding="utf-8")
