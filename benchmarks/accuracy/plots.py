"""The pictures of docs/accuracy.md; needs matplotlib (the extra `plot`)."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from benchmarks.accuracy.ablations import TERMS
from benchmarks.accuracy.probability import coverage_curves, reliability
from benchmarks.accuracy.rows import Row
from benchmarks.accuracy.rows_operators import LIGER
from benchmarks.accuracy.rows_points import BERT, NOTEBOOK, T4, THREAD, VIT_L
from benchmarks.accuracy.rows_published import CAPS, CNNS, TRANSFORMERS
from benchmarks.accuracy.stats import errors_of, right_of
from benchmarks.accuracy.torchtitan import TORCHTITAN
from benchmarks.accuracy.torchtune import TORCHTUNE

OWN, OTHERS, TRUTH, SECOND = "#1f6fb4", "#9aa1a8", "#c1272d", "#e08a1e"
_DPI = 100
_COLOURS = {
    CNNS: OWN, TRANSFORMERS: SECOND, NOTEBOOK: "#3a923a", THREAD: "#3a923a", VIT_L: "#8b5aa8", BERT: TRUTH,
    T4: "#333333", LIGER: "#17becf", TORCHTUNE: "#bcbd22", TORCHTITAN: "#8c564b",
}  # fmt: skip
_NAMES = {
    "planner": "this planner", "xmem": "xMem", "memtracker": "MemTracker", "dnnmem": "DNNMem",
    "formula": "closed formula", "torchinfo": "torchinfo", "llmem": "LLMem", "schedtune": "SchedTune",
    "preflight": "torch-preflight, name", "preflight_meta": "torch-preflight, meta",
}  # fmt: skip
_CLIP = 0.8


def draw_all(rows: Sequence[Row], folder: Path) -> None:
    """Draw all pictures into a folder."""
    for name, draw, size in (
        ("accuracy_peaks", _peaks, (8.2, 4.6)),
        ("accuracy_estimators", _estimators, (8.2, 4.4)),
        ("accuracy_terms", _terms, (8.2, 4.2)),
        ("accuracy_probability", _probability, (8.2, 5.6)),
    ):
        figure = Figure(figsize=size, dpi=_DPI, layout="constrained")
        draw(figure, rows)
        figure.savefig(folder / f"{name}.png")


def _clean(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, linewidth=0.6)


def _peaks(figure: Figure, rows: Sequence[Row]) -> None:
    """Draw ours over measured, against the measured peak."""
    axes = figure.add_subplot()
    for source, colour in _COLOURS.items():
        selected = [
            row
            for row in rows
            if row.source == source and row.layer != "E" and row.error("planner") is not None
        ]
        selected = [row for row in selected if source != NOTEBOOK or row.layer == "B"]
        if selected:
            peaks = [float(row.truth) / 1024 for row in selected]
            errors = [row.error("planner") or 0.0 for row in selected]
            label = f"{source} ({len(selected)})"
            axes.scatter(peaks, errors, s=22, color=colour, alpha=0.75, linewidths=0, label=label)
    axes.axhline(0, color="#555555", linewidth=0.8)
    axes.axhspan(-0.02, 0.02, color="#000000", alpha=0.06, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda gib, _: _size_text(gib)))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel("measured peak")
    axes.set_ylabel("ours against measured")
    axes.legend(fontsize=8.5, frameon=False, loc="lower left", ncols=2)
    axes.set_title("Peaks: shaded is within 2 %", fontsize=11, loc="left")
    _clean(axes)


def _size_text(gib: float) -> str:
    """Return a size with the unit in which it is 1 or more."""
    units = ("GiB", "MiB", "KiB")
    power = next((number for number in range(len(units)) if gib * 1024**number >= 1), len(units) - 1)
    return f"{gib * 1024**power:g} {units[power]}"


def _estimators(figure: Figure, rows: Sequence[Row]) -> None:
    """Draw signed errors of each estimator on xMem's runs."""
    axes = figure.add_subplot()
    jitter = np.random.default_rng(0)
    present = {estimator for row in rows if row.source in (CNNS, TRANSFORMERS) for estimator in row.estimates}
    names = {estimator: name for estimator, name in _NAMES.items() if estimator in present}
    for place, estimator in enumerate(names):
        for source, colour in ((CNNS, OWN), (TRANSFORMERS, SECOND)):
            of_source = [row.error(estimator) for row in rows if row.source == source]
            errors = [error for error in of_source if error is not None]
            heights = (
                place + (0.17 if source == TRANSFORMERS else -0.17) + jitter.uniform(-0.1, 0.1, len(errors))
            )
            axes.scatter(
                np.clip(errors, -_CLIP, _CLIP), heights, s=12, color=colour, alpha=0.65, linewidths=0
            )
        both = errors_of((row for row in rows if row.source in (CNNS, TRANSFORMERS)), estimator)
        if both is not None:
            text = f"median {both.median_absolute:.1%}, n {both.count}"
            axes.text(1.02, place, text, transform=axes.get_yaxis_transform(), va="center", fontsize=9)
    axes.axvline(0, color="#555555", linewidth=0.8)
    axes.set_yticks(range(len(names)), list(names.values()))
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(-_CLIP * 1.03, _CLIP * 1.03)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_title(
        "Errors on xMem's runs: blue CNNs, orange transformers; beyond 80 % at the edge",
        fontsize=11,
        loc="left",
    )
    _clean(axes)


def _terms(figure: Figure, rows: Sequence[Row]) -> None:
    """Draw each term's share: median of the errors, and outcomes called wrong."""
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1.3, 1))
    terms = {"planner": "the whole model", **TERMS}
    labels = [label.partition(":")[0].replace(" where memory is short", "") for label in terms.values()]
    labels = [label if len(label) < 48 else label[:45].rpartition(" ")[0] + " ..." for label in labels]
    for place, estimator in enumerate(terms):
        for shift, source, colour in ((-0.2, CNNS, OWN), (0.2, TRANSFORMERS, SECOND)):
            errors = errors_of((row for row in rows if row.source == source), estimator)
            if errors is not None:
                left.barh(place + shift, errors.median_absolute, height=0.36, color=colour)
        judged = right_of((row for row in rows if row.source == CAPS), estimator)
        if judged is not None:
            right.barh(
                place, 1 - judged[0] / judged[1], height=0.6, color=OTHERS if estimator != "planner" else OWN
            )
    left.set_yticks(range(len(terms)), labels, fontsize=8.5)
    left.set_ylim(len(terms) - 0.5, -0.5)
    left.set_title("median error, by CNNs and transformers", fontsize=9.5, loc="left")
    right.set_title("outcomes called wrong", fontsize=9.5, loc="left")
    for axes in (left, right):
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        _clean(axes)


def _probability(figure: Figure, rows: Sequence[Row]) -> None:
    """Draw stated against observed: deaths by kind, and peaks within their bounds."""
    panels = figure.subplots(2, 3)
    for axes in panels.flat:
        axes.plot([0, 1], [0, 1], color="#555555", linewidth=0.8)
        axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        _clean(axes)
    for axes, (kind, bins) in zip(panels.flat, reliability(rows).items(), strict=False):
        stated = [group.stated for group in bins]
        observed = [group.observed for group in bins]
        low = [group.observed - group.low for group in bins]
        high = [group.high - group.observed for group in bins]
        axes.errorbar(stated, observed, yerr=[low, high], fmt="o", color=OWN, capsize=2, markersize=5)
        axes.set_title(f"{kind} ({sum(one.outcomes for one in bins)})".replace(", ", ",\n"), fontsize=8.5)
    last = panels[1][2]
    for (name, (stated_at, seen)), colour in zip(
        coverage_curves(rows).items(), (OWN, SECOND, TRUTH), strict=False
    ):
        last.plot(stated_at, seen, color=colour, label=name)
    last.set_title("peaks within their upper bound", fontsize=9)
    last.legend(fontsize=6, frameon=False, loc="lower right")
    last.set_xlabel("stated confidence", fontsize=9)
    for axes in (panels[0][0], panels[1][0]):
        axes.set_ylabel("share that died", fontsize=9)
    for axes in panels[1][:2]:
        axes.set_xlabel("stated probability", fontsize=9)
    figure.suptitle("Each model judged by the others; 95 % intervals, one count a job", fontsize=10)
