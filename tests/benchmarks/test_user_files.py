"""Scripts as people write them: their rows, and the page that shows them."""

from pathlib import Path

from benchmarks.emulated.capabilities.commands import FILES
from benchmarks.emulated.capabilities.page import is_within_bars
from benchmarks.emulated.capabilities.registry import HERE, load_capability
from benchmarks.emulated.capabilities.steps_page import PAGE, with_table
from benchmarks.emulated.rows import Row
from benchmarks.rows import read_rows
from planner.jobs.options import FIELD_OPTIONS
from planner.jobs.resolve import _OF_THE_LOOP


def test_scripts_are_planned_within_the_bars() -> None:
    """At least 20 scripts ran on both sides; all but those whose cause is named are within 0.1 % of allocated
    and 1 % of reserved memory, and no more than two have one.
    """
    capability = load_capability("user_files")
    rows = read_rows(HERE / "user_files.csv", Row)
    assert sum(not row.failure for row in rows) >= 20
    outside = {row.number for row in rows if row.failure or not is_within_bars(row)}
    assert outside == capability.causes.keys()
    assert len(outside) <= 2


def test_every_script_is_the_job_of_a_row() -> None:
    """No file of the folder is without a row, and no row's file is missing."""
    rows = [*read_rows(HERE / "user_files.csv", Row), *read_rows(HERE / "compiled.csv", Row)]
    files = {row.model.partition(":")[0] for row in rows if row.model.startswith(FILES)}
    assert files == {f"{FILES}/{path.name}" for path in Path(FILES).glob("*.py")}


def test_the_table_of_scripts_is_that_of_the_rows() -> None:
    """docs/training_steps.md has the table that the script writes."""
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page) == page


def test_options_that_the_step_decides_are_named() -> None:
    """Each option that is refused beside a step of one's own stands on the page."""
    page = PAGE.read_text(encoding="utf-8")
    assert [name for name in _OF_THE_LOOP if f"`{FIELD_OPTIONS[name].flag}`" not in page] == []
