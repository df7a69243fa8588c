"""The registry of reports: every result has one, made of what the result holds."""

from importlib import import_module
from inspect import signature
from pkgutil import walk_packages

import pytest

import planner.api
import planner.cli.commands
from planner.report.result import REPORTS, Result


def result_classes() -> dict[str, type[Result]]:
    """Every result of the API and of the command line, by name."""
    for package in (planner.api, planner.cli.commands):
        for module in walk_packages(package.__path__, f"{package.__name__}."):
            if ".integrations" not in module.name:  # their libraries may be missing
                import_module(module.name)
    return {one.__name__: one for one in subclasses(Result)}


def subclasses(of: type[Result]) -> list[type[Result]]:
    """Every class beneath a class."""
    return [one for direct in of.__subclasses__() for one in (direct, *subclasses(direct))]


def test_every_result_has_a_report() -> None:
    """No result is without a report, and no report without a result."""
    assert sorted(result_classes()) == sorted(REPORTS)


@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.parametrize("suffix", ["document", "to_json"])
def test_a_report_takes_attributes_of_its_result(name: str, suffix: str) -> None:
    """Each parameter of a report names an attribute of the result."""
    module, _, prefix = REPORTS[name].partition(":")
    report = getattr(import_module(f"planner.report.commands.{module}"), f"{prefix}_{suffix}")
    assert [one for one in signature(report).parameters if not hasattr(result_classes()[name], one)] == []
