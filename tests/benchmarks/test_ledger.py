"""docs/ledger.md is what its tables give, and names first where another tool is better."""

import re

from benchmarks.accuracy import ledger
from benchmarks.accuracy.rows import DIES, LIVES, Row
from benchmarks.accuracy.rows_published import CAPS, TRANSFORMERS


def peak(case: str, truth: float, **estimates: float) -> Row:
    """A measured peak with the answers of some tools."""
    answers = {tool: str(size) for tool, size in estimates.items()}
    return Row(TRANSFORMERS, "D", "net", case, "transformer", "RTX 3060 12GB", 8, str(truth), answers)


def outcome(case: str, limit: float, truth: str, planner: str) -> Row:
    """A run under a cap."""
    answers = {"planner": planner}
    return Row(CAPS, "E", "net", case, "transformer", "RTX 3060 12GB", 8, truth, answers, limit_mib=limit)


def test_the_page_is_what_the_tables_give() -> None:
    """Written again from the stored tables, the page is the same."""
    assert ledger.PAGE.read_text(encoding="utf-8") == ledger.write_ledger()


def test_where_another_tool_is_better_stands_first() -> None:
    """The first section is of what others do better, and every row and table begins with it."""
    rows, _ = ledger.ledger_rows()
    titles = re.findall(r"^## (.+)$", ledger.write_ledger(), re.MULTILINE)
    assert titles[0] == "Where another tool is better"
    for ordered in (ledger.pairs_of(rows), ledger.misses_of(rows)):
        worse = [one.is_worse for one in ordered]
        assert worse == sorted(worse, reverse=True)
    lost = [by for by, _, _ in ledger.closer_rows(rows)]
    assert lost == sorted(lost, reverse=True) and lost[-1] > 0


def test_a_better_median_or_percentile_is_worse_for_us() -> None:
    """A tool with the smaller median, whatever its 95th percentile, comes before one worse in both."""
    rows = [
        *(peak(f"a{number}", 100, planner=102, xmem=101, memtracker=110) for number in range(9)),
        peak("far", 100, planner=102, xmem=150, memtracker=110),
    ]
    first, second = ledger.pairs_of(rows)
    assert (first.tool, first.is_worse, second.tool, second.is_worse) == ("xmem", True, "memtracker", False)
    assert [(row.case, tool) for _, row, tool in ledger.closer_rows(rows)] == [
        (f"a{number}", "xmem") for number in range(9)
    ]


def test_outcomes_are_counted_by_what_a_tool_says() -> None:
    """An estimate within the memory says that the run lives; both kinds of wrong answers are counted."""
    rows = [
        peak("run", 1000, planner=1000, memtracker=900),
        outcome("run under 950", 950, DIES, planner=LIVES),
        outcome("run under 850", 850, LIVES, planner=LIVES),
        outcome("run under 1100, again", 1100, LIVES, planner=LIVES),
        outcome("another under 950", 950, DIES, planner=DIES),
    ]
    (misses,) = ledger.misses_of(rows)
    assert misses == ledger.Misses("memtracker", 3, said_lives=1, said_dies=1, ours_lives=1, ours_dies=0)
    assert not misses.is_worse
