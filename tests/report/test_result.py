"""Results and their reports: mypy holds that a report takes what its result has."""

from importlib import import_module
from pkgutil import walk_packages

import planner.api
import planner.cli.commands
from planner.report.result import Result


def subclasses(of: type[Result]) -> list[type[Result]]:
    """Every class beneath a class."""
    return [one for direct in of.__subclasses__() for one in (direct, *subclasses(direct))]


def test_every_result_has_a_report() -> None:
    """Each result of the API and of the command line names its own report."""
    for package in (planner.api, planner.cli.commands):
        for module in walk_packages(package.__path__, f"{package.__name__}."):
            if ".integrations" not in module.name:  # their libraries may be missing
                import_module(module.name)
    found = subclasses(Result)
    assert len(found) > 20
    assert [one.__name__ for one in found if "_report" not in vars(one)] == []
