"""Fit planner/hardware/residuals.json to the rows of accuracy.csv: a distribution for each kind of runs.

A run dies if it needs more than its allocator has. (What it needs) / (what its replay needs) is taken as
normal; its two parameters are those that the published outcomes of the kind make likely. Of runs of fixed
sizes they are those of a few peaks, whose loop and version are known; of the doubts about stored answers for
convolutions, the needs of jobs by both sources in benchmarks/emulated.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import to_builtins
from scipy.stats import norm, t

from benchmarks.accuracy.rows import DIES, Row
from benchmarks.accuracy.rows_points import T4
from benchmarks.accuracy.rows_published import CAPS, CNNS, TIMM, TRANSFORMERS
from benchmarks.emulated.answers import ANSWERS, AnswersRow
from benchmarks.emulated.own_cnns import OWN_CNNS, OwnCnnRow
from benchmarks.emulated.volumes import VOLUMES, VolumesRow
from benchmarks.rows import read_rows as read_emulated
from planner.hardware.likeness import MOSTLY
from planner.hardware.residuals import RESIDUALS_FILE, Doubt, KindSettings, RunKind, Spread

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
    "the outcomes make it, and of fixed sizes the peaks. peak_ratios: process peaks on an empty card over "
    "replayed peak reserved, model and optimizer on both sides. doubts: deviations that are added: setting, "
    "between the means of kinds and GPUs; stored, similar and far, by answers.csv and own_cnns.csv of "
    "benchmarks/emulated; volumes and uncounted, by volumes.csv there."
)
RESTS_ON = {
    Doubt.STORED: "CNNs by stored answers beside the same by the library, both computed",
    Doubt.SIMILAR: "the same on images of other sizes, where some answers are of similar convolutions",
    Doubt.FAR: "the same of networks as people write them, most of whose answers are of far convolutions",
    Doubt.VOLUMES: "the same of three-dimensional CNNs at sizes that are not stored",
    Doubt.UNCOUNTED: "needs of three-dimensional CNNs without workspaces beside those by the library, both "
    "computed",
}
FEW_PEAKS_CONFIDENCE = 0.99  # at which a normal distribution stands for Student's


@dataclass(frozen=True, slots=True)
class Group:
    """The sources of a kind's rows, and the settings of their training."""

    runs: str
    settings: KindSettings | None = None  # None: they leave no trace in the differences
    outcomes: tuple[str, ...] = ()  # sources of outcomes
    peaks: tuple[str, ...] = ()  # sources of peaks
    judged: tuple[str, ...] = ()  # sources of outcomes that no parameter is fitted to


GROUPS: Mapping[RunKind, Group] = {
    RunKind.FIXED: Group(
        "transformers and a CNN on a T4 (torch 2.11, mixed precision, batches of fixed sizes)",
        peaks=(T4,),
        judged=(TIMM,),
    ),
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
    RunKind.TEXTS: Group(
        "transformers in float32 on texts padded to the longest of a batch (xMem, torch 2.6, RTX 3060 and "
        "4060)",
        outcomes=(CAPS,),
        peaks=(TRANSFORMERS,),
    ),
    RunKind.LARGE: Group(
        "models of billions of parameters in float32 (A100 40GB), of which only median and 95th percentile "
        "of the error are known",
    ),
}


def outcomes_of(rows: Iterable[Row], kind: RunKind) -> list[Row]:
    """Return the outcomes that a kind is fitted to."""
    return _outcomes_from(rows, kind, GROUPS[kind].outcomes)


def judged_outcomes_of(rows: Iterable[Row], kind: RunKind) -> list[Row]:
    """Return the outcomes that judge a kind and that no parameter is fitted to."""
    return _outcomes_from(rows, kind, GROUPS[kind].judged)


def _outcomes_from(rows: Iterable[Row], kind: RunKind, sources: Sequence[str]) -> list[Row]:
    return [
        row
        for row in rows
        if row.kind == kind.value and row.source in sources and row.needed_mib and row.family != OTHER_MODEL
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
    if kind is RunKind.FIXED:
        return spread_of_peaks([peak_ratio(row) for row in peak_rows(rows, kind)])
    if kind is RunKind.LARGE:
        scale = max(LARGE_MEDIAN / norm.ppf(0.75), LARGE_95 / norm.ppf(0.975))
        return Spread(0, 0.0, round(float(scale), 5))
    return fit_spread(outcomes_of(rows, kind))


def spread_of_peaks(ratios: Sequence[float]) -> Spread:
    """Return the distribution about 1 that a few peaks predict for the next: Student's, as a normal one."""
    factor = t.ppf(FEW_PEAKS_CONFIDENCE, len(ratios)) / norm.ppf(FEW_PEAKS_CONFIDENCE)
    scale = np.sqrt(np.mean(np.square(np.array(ratios) - 1))) * factor
    return Spread(0, 0.0, round(float(scale), 5))


def spread_of_answers(doubt: Doubt) -> tuple[float, float]:
    """Return the deviations of needs and of peaks by the library from those by such answers."""
    own = read_emulated(OWN_CNNS, OwnCnnRow)
    if doubt in (Doubt.STORED, Doubt.SIMILAR):
        rows = [
            *(row for row in read_emulated(ANSWERS, AnswersRow) if row.convolutions == doubt.value),
            *(row for row in own if row.convolutions == doubt.value and row.is_near),
        ]
        needs = [row.library_mib / row.stored_mib - 1 for row in rows]
        peaks = [row.library_peak_mib / row.stored_peak_mib - 1 for row in rows]
        return root_mean_square(needs), root_mean_square(peaks)
    if doubt is Doubt.FAR:
        far = [row for row in own if row.far >= MOSTLY]
        needs = [row.library_mib / row.stored_mib for row in far]
        peaks = [row.library_peak_mib / row.stored_peak_mib for row in far]
        return deviation_of(needs), deviation_of(peaks)
    volumes = read_emulated(VOLUMES, VolumesRow)
    if doubt is Doubt.VOLUMES:
        volumes = [row for row in volumes if row.convolutions == Doubt.SIMILAR.value]
        needs = [row.library_mib / row.stored_mib for row in volumes]
        peaks = [row.library_peak_mib / row.stored_peak_mib for row in volumes]
    else:
        needs = [row.library_mib / row.uncounted_mib for row in volumes]
        peaks = [row.library_peak_mib / row.uncounted_peak_mib for row in volumes]
    return deviation_of(needs), deviation_of(peaks)


def deviation_of(ratios: Sequence[float]) -> float:
    """Return a deviation about 1: the root mean square, or what gives the largest its rank."""
    farthest = (max(ratios) - 1) / norm.ppf(len(ratios) / (len(ratios) + 1))
    return max(root_mean_square([ratio - 1 for ratio in ratios]), float(farthest))


def root_mean_square(differences: Sequence[float]) -> float:
    """Return the deviation about none."""
    return float(np.sqrt(np.mean(np.square(differences))))


def peak_ratio(row: Row) -> float:
    """Return measured over replayed, with the memory of model and optimizer on both sides."""
    whole = float(row.estimates.get("no_set_up", row.estimates["planner"]))
    return (float(row.truth) + whole - float(row.estimates["planner"])) / whole


def peak_rows(rows: Iterable[Row], kind: RunKind) -> list[Row]:
    """Return the peaks of a kind: of reserved memory, and of processes where that is not known."""
    of_kind = [row for row in rows if row.source in GROUPS[kind].peaks and row.kind == kind.value]
    return [row for row in of_kind if row.layer == "C"] or [row for row in of_kind if row.layer == "D"]


def peak_ratios(rows: Iterable[Row], kind: RunKind, without: str = "") -> list[float]:
    """Return the ratios of a kind, rising, without those of the model `without`."""
    return sorted(peak_ratio(row) for row in peak_rows(rows, kind) if row.model != without)


def peak_count(rows: Iterable[Row], kind: RunKind) -> int:
    """Return the number of peaks behind a kind, those included of which only quantiles are known."""
    return LARGE_PEAKS if kind is RunKind.LARGE else len(peak_ratios(rows, kind))


def means(rows: Sequence[Row], without: RunKind | None = None) -> list[float]:
    """Return the mean, less 1, of each kind on each GPU, without the kind `without`."""
    values = []
    for kind in RunKind:
        outcomes = [] if kind is without else outcomes_of(rows, kind)
        for gpu in sorted({row.gpu for row in outcomes}):
            values.append(fit_spread([row for row in outcomes if row.gpu == gpu]).location)
        peaks = peak_rows(rows, kind) if kind is RunKind.FIXED and kind is not without else []
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
    setting = between_kinds(rows)
    doubts = {
        Doubt.SETTING: ((setting, setting), "the means of these kinds of runs on each GPU"),
        **{doubt: (spread_of_answers(doubt), RESTS_ON[doubt]) for doubt in RESTS_ON},
    }
    content = {
        "about": ABOUT,
        "doubts": {
            doubt.value: {"scale": round(scale, 5), "peak_scale": round(peaks, 5), "rests_on": rests_on}
            for doubt, ((scale, peaks), rests_on) in doubts.items()
        },
        "kinds": kinds,
    }
    RESIDUALS_FILE.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def between_kinds(rows: Sequence[Row], without: RunKind | None = None) -> float:
    """Return the deviation between the means of kinds on each GPU."""
    return float(np.std(means(rows, without), ddof=1))
