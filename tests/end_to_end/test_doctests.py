"""The examples in docstrings have the results that they show."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): text.count(">>>")
    for package in ("planner", "calibration")
    for path in sorted((ROOT / package).rglob("*.py"))
    for text in (path.read_text(),)
    if ">>>" in text
}


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_docstrings_hold(name: str) -> None:
    """Each `>>>` begins an example, whose result is on the next line."""
    found = doctest.testmod(import_module(name))
    assert (found.failed, found.attempted) == (0, MODULES[name])
