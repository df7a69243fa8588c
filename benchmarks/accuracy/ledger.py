"""Write docs/ledger.md: this planner beside other tools on the same published runs, the worse rows first.

    python -m benchmarks.accuracy.ledger

The figures are those of accuracy.csv, preflight.csv, others.csv (others.py).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from benchmarks.accuracy import ledger_texts as texts
from benchmarks.accuracy.others import OTHERS_TABLE
from benchmarks.accuracy.report import DOCS, table
from benchmarks.accuracy.rows import DIES, LIVES, PEERS, PREFLIGHT, PUBLISHED, Row, read_rows
from benchmarks.accuracy.rows_points import BERT, NOTEBOOK, T4, VIT_L
from benchmarks.accuracy.rows_published import CAPS, CARD, CNNS, TRANSFORMERS
from benchmarks.accuracy.seconds import SECONDS_TABLE
from benchmarks.accuracy.stats import Errors, errors_of, percent
from benchmarks.published.outcomes import RUNS
from benchmarks.rows import read_lines

PAGE = DOCS / "ledger.md"
SOURCES = (CNNS, TRANSFORMERS, NOTEBOOK, T4, BERT, VIT_L)
OTHERS = ("kitsune", "fitcheck", "accelerate")
NAMES = {
    "planner": "this planner",
    "xmem": "xMem",
    "dnnmem": "DNNMem",
    "schedtune": "SchedTune",
    "llmem": "LLMem",
    "preflight": "torch-preflight, by name",
    "preflight_meta": "torch-preflight, on meta",
    "memtracker": "MemTracker",
    "torchinfo": "torchinfo",
    "formula": "closed formula",
    "kitsune": "kitsune",
    "fitcheck": "fitcheck",
    "accelerate": "accelerate",
}
TOOLS = tuple(name for name in NAMES if name != "planner")
CLOSEST = 15  # rows that are shown where another tool is closer
_TOTAL_MIB = {"RTX 3060 12GB": 12_037.4, "RTX 4060 8GB": 7_932.9}  # as torch saw it in these runs


@dataclass(frozen=True, slots=True)
class Pair:
    """Errors of a tool and of the planner on the rows of a source that the tool answers."""

    source: str
    tool: str
    errors: Errors
    ours: Errors

    @property
    def is_worse(self) -> bool:
        """Return whether the planner is worse by the median or by the 95th percentile."""
        return (
            self.errors.median_absolute < self.ours.median_absolute
            or self.errors.high_absolute < self.ours.high_absolute
        )

    @property
    def cells(self) -> str:
        own = f"{self.ours.median_absolute:.2%} | {self.ours.high_absolute:.1%}"
        return (
            f"{self.source} | {NAMES[self.tool]} | {self.errors.count} | {self.errors.median_absolute:.2%} | "
            f"{self.errors.high_absolute:.1%} | {own}"
        )


@dataclass(frozen=True, slots=True)
class Misses:
    """Outcomes that a tool and the planner call: how many, and how many wrong in each way."""

    tool: str
    count: int
    said_lives: int  # and the run died
    said_dies: int  # and the run lived
    ours_lives: int
    ours_dies: int

    @property
    def is_worse(self) -> bool:
        """Return whether the planner is worse in either kind."""
        return self.said_lives < self.ours_lives or self.said_dies < self.ours_dies


def ledger_rows() -> tuple[list[Row], list[Mapping[str, str]]]:
    """Return the rows with the answers of all tools, and the lines of others.csv."""
    lines: list[Mapping[str, str]] = read_lines(OTHERS_TABLE)
    more: dict[tuple[str, str, str], dict[str, str]] = {}
    for line in lines:
        if line["mib"]:
            more.setdefault((line["source"], line["layer"], line["case"]), {})[line["tool"]] = line["mib"]
    return [replace(row, estimates={**row.estimates, **more.get(row.key, {})}) for row in read_rows()], lines


def pairs_of(rows: Sequence[Row]) -> list[Pair]:
    """Return the pairs of all sources and tools, those first in which the planner is worse."""
    pairs = []
    for source in SOURCES:
        for tool in TOOLS:
            answered = [row for row in rows if row.source == source and row.error(tool) is not None]
            errors, ours = errors_of(answered, tool), errors_of(answered, "planner")
            if errors is not None and ours is not None:
                pairs.append(Pair(source, tool, errors, ours))
    return sorted(pairs, key=lambda pair: not pair.is_worse)


def closer_rows(rows: Sequence[Row]) -> list[tuple[float, Row, str]]:
    """Return by how much another tool's answer is closer, with row and tool, the most first."""
    found = []
    for row in rows:
        ours = row.error("planner")
        if row.source in SOURCES and ours is not None:
            for tool in TOOLS:
                theirs = row.error(tool)
                if theirs is not None and abs(theirs) < abs(ours):
                    found.append((abs(ours) - abs(theirs), row, tool))
    return sorted(found, key=lambda one: -one[0])


def misses_of(rows: Sequence[Row]) -> list[Misses]:
    """Return how each tool calls the outcomes, those first in which the planner is worse."""
    peaks = {row.case: row for row in rows if row.source in (CNNS, TRANSFORMERS)}
    outcomes = [row for row in rows if row.source in (CAPS, CARD)]
    result = []
    for tool in TOOLS:
        judged = []
        for row in outcomes:
            peak = peaks.get(row.case.partition(" under ")[0])
            if peak is not None and peak.estimates.get(tool):
                judged.append((row.truth, verdict(peak, row, tool), row.estimates["planner"]))
        if judged:
            said = Counter((truth, verdict) for truth, verdict, _ in judged)
            ours = Counter((truth, own) for truth, _, own in judged)
            wrong = (DIES, LIVES), (LIVES, DIES)
            counts = (*(said[one] for one in wrong), *(ours[one] for one in wrong))
            result.append(Misses(tool, len(judged), *counts))
    return sorted(result, key=lambda one: not one.is_worse)


def verdict(peak: Row, outcome: Row, tool: str) -> str:
    """Return whether a tool says that a run lives or dies in the memory of an outcome."""
    size, limit = float(peak.estimates[tool]), outcome.limit_mib or 0.0
    if tool in PUBLISHED:
        limit += 0.005 * _TOTAL_MIB[outcome.gpu]
    elif "no_set_up" in peak.estimates:  # taken off, since the measured peak does not hold it
        size += float(peak.estimates["no_set_up"]) - float(peak.estimates["planner"])
    return LIVES if size <= limit else DIES


def _worse(rows: Sequence[Row], pairs: Sequence[Pair], misses: Sequence[Misses]) -> Iterator[str]:
    yield "## Where another tool is better\n"
    groups = [pair for pair in pairs if pair.is_worse]
    fewer = [one for one in misses if one.is_worse]
    head = "runs | tool | n | median | 95th percentile | ours, median | ours, 95th"
    if groups:
        yield "By the median of the absolute error or its 95th percentile, over rows that the tool answers:\n"
        yield from table(head, (pair.cells for pair in groups), 2)
    else:
        yield "By median or 95th percentile over all rows that a tool answers: nowhere.\n"
    if fewer:
        yield "By outcomes: fewer runs called alive that died, or fewer called dead that lived:\n"
        yield from _misses_table(fewer)
    closer = closer_rows(rows)
    answered = sum(row.error(tool) is not None for row in rows if row.source in SOURCES for tool in TOOLS)
    by_tool = Counter(NAMES[tool] for _, _, tool in closer).most_common()
    yield (
        f"By single rows: of {answered:,} answers of other tools {len(closer)} are closer to the measured "
        f"figure than the planner's ({', '.join(f'{name} {count}' for name, count in by_tool)}). "
        f"The {CLOSEST} by which we lose most:\n"
    )
    cells = (
        f"{row.case} | {row.source} | {NAMES[tool]} | {float(row.truth):,.0f} | "
        f"{percent(row.error(tool) or 0, 1)} | {percent(row.error('planner') or 0, 1)}"
        for _, row, tool in closer[:CLOSEST]
    )
    yield from table("run | | tool | measured MiB | its error | ours", cells, 3)


def _misses_table(misses: Iterable[Misses]) -> Iterator[str]:
    cells = (
        f"{NAMES[one.tool]} | {one.count} | {one.said_lives} | {one.said_dies} | "
        f"{one.ours_lives} | {one.ours_dies}"
        for one in misses
    )
    yield from table(
        "tool | outcomes | said lives, died | said dies, lived | ours: died | ours: lived", cells, 1
    )


def _seconds() -> Iterator[str]:
    runs = read_lines(RUNS)
    cells = []
    for tool in ("xmem", "dnnmem"):
        some = [float(run[f"{tool}_runtime_s"]) for run in runs if run[f"{tool}_runtime_s"]]
        cells.append(f"{NAMES[tool]} | {median(some):,.1f} | {max(some):,.1f} | {len(some)}")
    yield from table("tool | seconds, median | most | answers", cells, 1)
    yield texts.SECONDS_HERE
    by_tool: dict[str, list[float]] = {}
    for line in read_lines(SECONDS_TABLE):
        by_tool.setdefault(line["tool"], []).append(float(line["seconds"]))
    own = median(by_tool["planner"])
    cells = [
        f"{NAMES[tool]} | {median(some):,.3f} | {max(some):,.3f} | {median(some) / own:.2f}"
        for tool, some in sorted(by_tool.items(), key=lambda item: -median(item[1]))
    ]
    yield from table("tool | seconds, median | most | median over the planner's", cells, 1)


def _refusals(rows: Sequence[Row], lines: Sequence[Mapping[str, str]]) -> Iterator[str]:
    asked = [row for row in rows if row.source in SOURCES and (row.layer != "C" or row.source == VIT_L)]
    reasons: dict[str, Counter[str]] = {tool: Counter() for tool in TOOLS}
    explained = Counter((line["tool"], *_key(line)) for line in lines if line["reason"])
    for line in lines:
        if line["reason"]:
            reasons[line["tool"]][line["reason"]] += 1
    for row in asked:
        for tool in TOOLS:
            if not row.estimates.get(tool) and not explained[(tool, *row.key)] and _was_asked(tool, row):
                reasons[tool][_reason(tool, row)] += 1
    cells = []
    for tool in TOOLS:
        answered = sum(bool(row.estimates.get(tool)) for row in rows if row.source in SOURCES)
        why = "; ".join(f"{count}: {reason}" for reason, count in reasons[tool].most_common())
        cells.append(
            (
                sum(reasons[tool].values()),
                f"{NAMES[tool]} | {answered} | {sum(reasons[tool].values())} | {why}",
            )
        )
    yield from table("tool | answered | without an answer | why", (cell for _, cell in cells), 3)


def _key(line: Mapping[str, str]) -> tuple[str, str, str]:
    return line["source"], line["layer"], line["case"]


def _was_asked(tool: str, row: Row) -> bool:
    """Return whether a tool without a figure was asked for a row."""
    if tool in PUBLISHED:
        return row.source in (CNNS, TRANSFORMERS)
    if tool in PEERS:
        return row.source in (CNNS, TRANSFORMERS)
    if tool in PREFLIGHT:
        layers = {CNNS: "D", TRANSFORMERS: "D", T4: "D", BERT: "D", VIT_L: "C", NOTEBOOK: "B"}
        return row.layer == layers[row.source] and row.model not in ("cnn", "unetr")
    return False


def _reason(tool: str, row: Row) -> str:
    if tool in PUBLISHED:
        return "no answer is published for the run"
    if tool == PREFLIGHT[0]:
        return "the model is not in its snapshot of architectures"
    if tool == PREFLIGHT[1]:
        return "the model does not run on meta by its constructor, or is known by a name alone"
    return f"no figure for {row.model}"


def write_ledger() -> str:
    """Return the page."""
    rows, lines = ledger_rows()
    pairs, misses = pairs_of(rows), misses_of(rows)
    head = "runs | tool | n | median | 95th percentile | ours, median | ours, 95th"
    parts: list[Iterable[str]] = [
        [texts.HEAD], _worse(rows, pairs, misses),
        ["## Errors\n", texts.ERRORS], table(head, (pair.cells for pair in pairs), 2),
        ["## Out of memory\n", texts.OUTCOMES], _misses_table(misses),
        ["## Seconds an answer\n", texts.SECONDS], _seconds(),
        ["## What each refuses\n", texts.REFUSALS], _refusals(rows, lines),
        ["## The tools\n", texts.TOOLS],
    ]  # fmt: skip
    return "\n".join(line for part in parts for line in part).rstrip("\n") + "\n"


if __name__ == "__main__":
    PAGE.write_text(write_ledger(), encoding="utf-8")
