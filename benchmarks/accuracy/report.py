"""Write docs/accuracy.md from the rows of accuracy.csv; plots.py draws its pictures."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks.accuracy import texts
from benchmarks.accuracy.ablations import TERMS
from benchmarks.accuracy.causes import cause_of_outcome, cause_of_peak, missed_brackets
from benchmarks.accuracy.collection import parts
from benchmarks.accuracy.kinds import write_residuals
from benchmarks.accuracy.measured import measured_lines
from benchmarks.accuracy.own_cnns import own_cnns_lines
from benchmarks.accuracy.probability import calibration_lines
from benchmarks.accuracy.rows import LAYERS, PEERS, PREFLIGHT, PUBLISHED, Row
from benchmarks.accuracy.rows_calibrated import CALIBRATED
from benchmarks.accuracy.rows_operators import CAUSES, KERNELS, LIGER, by_operator, with_held
from benchmarks.accuracy.rows_points import BERT, NOTEBOOK, T4, THREAD, VIT_L
from benchmarks.accuracy.rows_published import CAPS, CARD, CNNS, TIMM, TRANSFORMERS
from benchmarks.accuracy.settings import settings_lines
from benchmarks.accuracy.stats import (
    bars,
    deaths_at_estimate,
    errors_of,
    inside,
    inside_at,
    percent,
    right_of,
)
from benchmarks.accuracy.torchtitan import TORCHTITAN
from benchmarks.accuracy.torchtune import TORCHTUNE
from benchmarks.accuracy.volumes import volumes_lines
from benchmarks.published.timm_brackets import OTHER_OUTSIDE_MIB, OUTSIDE_MIB, TOTAL_MIB

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "accuracy.md"
WORST = 15
CAUSE_FROM = 1e-5  # errors from this on are explained
SOURCES = (CNNS, TRANSFORMERS, NOTEBOOK, THREAD, VIT_L, BERT, T4, LIGER, KERNELS, TORCHTUNE, TORCHTITAN)
NAMES = {
    "planner": "this planner",
    "formula": "closed formula",
    "torchinfo": "torchinfo",
    "memtracker": "MemTracker",
    "preflight": "torch-preflight 0.5.0, by name",
    "preflight_meta": "torch-preflight 0.5.0, on meta",
    "xmem": "xMem",
    "dnnmem": "DNNMem",
    "schedtune": "SchedTune",
    "llmem": "LLMem",
    "installed": "as today's torch runs it",
}


def write_report(rows: Sequence[Row]) -> str:
    """Write page, pictures and residuals. Returns the bars in a few lines."""
    from benchmarks.accuracy.plots import draw_all

    write_residuals(rows)
    draw_all(rows, DOCS)
    sections = (
        [texts.HEAD], measured_lines(table), [texts.FITTED], _bars(rows), settings_lines(rows), _peaks(rows),
        _beside(rows), _calibrated(rows), _outcomes(rows), _brackets(rows), _worst(rows), _ablation(rows),
        _points(rows), _collection(rows), _operators(rows), calibration_lines(rows),
        volumes_lines(), own_cnns_lines(),
    )  # fmt: skip
    text = "\n".join(line for section in sections for line in section).rstrip("\n")
    PAGE.write_text(text + "\n", encoding="utf-8")
    return "\n".join(
        f"{'reached' if bar.is_reached else 'MISSED '} {bar.value:>8}  {bar.condition}" for bar in bars(rows)
    )


def table(head: str, cells: Iterable[str], right_from: int = 1) -> Iterator[str]:
    """Yield a table of Markdown, with columns of figures from `right_from` on."""
    columns = head.count("|") + 1
    yield f"| {head} |"
    yield "|" + "|".join("---" if column < right_from else "--:" for column in range(columns)) + "|"
    yield from (f"| {line} |" for line in cells)
    yield ""


def _of(rows: Iterable[Row], *sources: str) -> list[Row]:
    return [row for row in rows if row.source in sources]


def _bars(rows: Sequence[Row]) -> Iterator[str]:
    yield "\n## The bars\n"
    verdicts = {True: "reached", False: "**missed**"}
    lines = (f"{bar.condition} | {bar.value} | {verdicts[bar.is_reached]}" for bar in bars(rows))
    yield from table("bar | value |", lines)
    deaths = deaths_at_estimate(rows)
    yield (
        "A run's outcomes under caps decide whether it would die at our estimate: it dies if it died "
        "under a cap as large as our peak reserved or larger, and lives if it lived under one as small. "
        f"{deaths['lives']} live, {deaths['dies']} die, {deaths['either']} did both, "
        f"{deaths['undecided']} are undecided by their caps.\n"
    )


def _peaks(rows: Sequence[Row]) -> Iterator[str]:
    yield "## Peaks, by layer and source\n"
    yield "![Our peaks over the measured ones](accuracy_peaks.png)\n"
    cells = []
    for layer, name in LAYERS.items():
        for source in SOURCES:
            errors = errors_of((row for row in _of(rows, source) if row.layer == layer), "planner")
            if errors is not None:
                cells.append(f"{layer} | {name.partition(',')[0]} | {source} | {errors.cells}")
    both = errors_of(_of(rows, CNNS, TRANSFORMERS), "planner")
    if both is not None:
        cells.append(f"D | process | all of xMem's | {both.cells}")
    yield from table(
        "layer | what | source | n | median | median, absolute | 95th percentile | worst", cells, 3
    )
    yield texts.PEAKS


def _beside(rows: Sequence[Row]) -> Iterator[str]:
    yield "## Beside other estimators, on the same rows\n"
    yield "![Errors of all estimators](accuracy_estimators.png)\n"
    cells = []
    for source in (CNNS, TRANSFORMERS, NOTEBOOK, T4, BERT, VIT_L):
        selected = _of(rows, source)
        for estimator in (*PEERS, *PREFLIGHT, *PUBLISHED):
            errors = errors_of(selected, estimator)
            if errors is None:
                continue
            ours = errors_of((row for row in selected if row.error(estimator) is not None), "planner")
            assert ours is not None
            own = f"{ours.median_absolute:.2%} | {ours.high_absolute:.1%}"
            cells.append(f"{source} | {NAMES[estimator]} | {errors.cells} | {own}")
    head = "source | estimator | n | median | median, absolute | 95th percentile | worst | ours, median absolute | ours, 95th"  # noqa: E501
    yield from table(head, cells, 2)
    yield texts.BESIDE


def _operators(rows: Sequence[Row]) -> Iterator[str]:
    if not _of(rows, LIGER):
        return
    yield "## Operators by themselves\n"
    yield texts.OPERATORS
    yield from _operator_table(_of(rows, LIGER))
    yield "### Liger's own kernels\n"
    yield texts.KERNELS
    yield from _operator_table(_of(rows, KERNELS), "0.8.5")
    yield texts.HELD


def _collection(rows: Sequence[Row]) -> Iterator[str]:
    if not _of(rows, LIGER):
        return
    yield "## Published runs on one and several GPUs\n"
    yield texts.COLLECTION
    head = (
        "source | GPUs | rows | reproduced | median, absolute | 95th percentile | worst | left out, and why"
    )
    yield from table(head, (part.line for part in parts(rows)), 2)


def _operator_table(rows: Sequence[Row], newest: str = "") -> Iterator[str]:
    """Yield a line for each operator, all of them, and all with what their processes held; `newest` is the
    release of the last column.
    """
    exact = sum(row.estimates["planner"] == row.truth for row in rows)
    yield f"{exact} of {len(rows)} are the published figure to all its digits.\n"
    cells = []
    for name, group in by_operator(rows).items():
        errors, now = errors_of(group, "planner"), errors_of(group, "installed")
        assert errors is not None
        cause = CAUSES.get((group[0].source, group[0].model), "") if abs(errors.worst) >= CAUSE_FROM else ""
        of_newest = f" | {percent(now.worst, 1)}" if newest and now is not None else ""
        cells.append(f"{name} | {group[0].gpu} | {errors.cells}{of_newest} | {cause}")
    for name, some in (("all", rows), ("all, with what was held", [with_held(row) for row in rows])):
        errors = errors_of(some, "planner")
        assert errors is not None
        cells.append(f"**{name}** |  | {errors.cells}{' | ' if newest else ''} | ")
    head = "operator, mode | GPU | n | median | median, absolute | 95th percentile | worst"
    yield from table(f"{head}{f' | worst, Liger {newest}' if newest else ''} | cause", cells, 2)


def _calibrated(rows: Sequence[Row]) -> Iterator[str]:
    selected = _of(rows, CALIBRATED)
    if not selected:
        return
    yield "## By level of calibration\n"
    yield texts.CALIBRATED
    cells = []
    for family, label in (("cnn", "CNNs"), ("transformer", "transformers")):
        some = [row for row in selected if row.family == family]
        for estimator, level in (("uncalibrated", "none"), ("planner", "same job and GPU, other batches")):
            errors = errors_of(some, estimator)
            if errors is not None:
                cells.append(f"{label} | {level} | {errors.cells}")
    yield from table("runs | calibration | n | median | median, absolute | 95th percentile | worst", cells, 2)


def _outcomes(rows: Sequence[Row]) -> Iterator[str]:
    yield "## Outcomes: does it live?\n"
    cells = []
    for source, family in ((CAPS, "cnn"), (CAPS, "transformer"), (CARD, "cnn"), (CARD, "transformer")):
        selected = [row for row in _of(rows, source) if row.family == family]
        right, all_of_them = right_of(selected, "planner") or (0, 0)
        died = sum(row.truth == "dies" for row in selected)
        share = f"{right / all_of_them:.1%}" if selected else ""
        cells.append(f"{source} | {family} | {all_of_them} | {died} | {right} | {share}")
    yield from table("runs | kind | n | of them died | called right | share", cells, 2)
    yield "Called wrong; `off` is the cap over what our replay needs at the least, less 1:\n"
    wrong = [row for row in _of(rows, CAPS, CARD) if row.is_right("planner") is False]
    lines = (
        f"{row.case} | {row.source} | {row.truth} | "
        f"{percent((row.limit_mib or 0) / (row.needed_mib or 1) - 1, 1)} | {cause_of_outcome(row, rows)}"
        for row in wrong
    )
    yield from table("run | | truth | off | cause", lines, 5)


def _brackets(rows: Sequence[Row]) -> Iterator[str]:
    held, count = inside(rows, "planner")
    if not count:
        return
    yield "## timm's brackets: the largest batch that trained\n"
    others = (
        f"{inside_at(rows, TOTAL_MIB - outside) / count:.1%} with {outside:,}"
        for outside in OTHER_OUTSIDE_MIB
    )
    yield (
        f"{held} of {count} inside ({held / count:.1%}) with {OUTSIDE_MIB:,} MiB outside the allocator, "
        f"{', '.join(others)} (`timm_brackets.py` names the sources). "
        "Misses by cause, each with what our replay needs over what there is at the batch called wrong:\n"
    )
    for cause, names in missed_brackets(rows).items():
        yield f"- {len(names)}: {cause}: {', '.join(names)}"
    yield ""


def _worst(rows: Sequence[Row]) -> Iterator[str]:
    yield f"## The {WORST} worst peaks of published training runs\n"
    selected = sorted(_of(rows, CNNS, TRANSFORMERS), key=lambda row: -abs(row.error("planner") or 0))[:WORST]
    lines = (
        f"{row.case} | {float(row.truth):,.0f} | {float(row.estimates['planner']):,.0f} | "
        f"{percent(row.error('planner') or 0, 1)} | {cause_of_peak(row, rows)}"
        for row in selected
    )
    yield from table("run | measured MiB | ours | error | cause", lines)


def _ablation(rows: Sequence[Row]) -> Iterator[str]:
    yield "## Each term left out\n"
    yield texts.TERMS
    yield "![Errors with each term left out](accuracy_terms.png)\n"
    cells = []
    for estimator, label in {"planner": "the whole model", **TERMS}.items():
        line = [label]
        for source in (CNNS, TRANSFORMERS):
            errors = errors_of(_of(rows, source), estimator)
            line += (
                ["", ""]
                if errors is None
                else [f"{errors.median_absolute:.2%}", f"{errors.high_absolute:.1%}"]
            )
        right = right_of(_of(rows, CAPS), estimator)
        line.append("" if right is None else f"{right[0] / right[1]:.1%}")
        has_brackets = right_of(_of(rows, TIMM), estimator) is not None
        held, count = inside(rows, estimator)
        line.append(f"{held / count:.1%}" if has_brackets else "")
        seed = errors_of((row for row in _of(rows, NOTEBOOK) if row.layer == "B"), estimator)
        line.append("" if seed is None else f"{seed.median_absolute:.2%}")
        cells.append(" | ".join(line))
    head = " | CNNs, median | 95th | transformers, median | 95th | caps right | brackets inside | notebook"
    yield from table(head, cells)


def _points(rows: Sequence[Row]) -> Iterator[str]:
    yield "## Single points\n"
    yield texts.POINTS
    cells = []
    for row in _of(rows, NOTEBOOK, THREAD, VIT_L, BERT, T4, TORCHTUNE, TORCHTITAN):
        error = row.error("planner")
        today = row.error("installed") if row.source == BERT else None
        cells.append(
            f"{row.case} | {row.layer} | {float(row.truth):,.1f} | {float(row.estimates['planner']):,.1f} | "
            f"{percent(error or 0)} | {'' if today is None else percent(today)} | {row.note}"
        )
    yield from table("case | layer | measured MiB | ours | error | today's torch | note", cells)
