"""The options of a job on the command line and in completion, as their table declares them."""

from typing import Any

import pytest

from planner.cli.completion.shells import candidates
from planner.cli.options import JOB
from planner.cli.parser import build_command, parse
from planner.jobs import JOB_OPTIONS, JobOption, OptionKind
from planner.planning.estimators import Method

COMMANDS = ("max-batch", "estimate", "gpus", "advise", "explain", "compare", "calibrate", "verify")
each_option = pytest.mark.parametrize("option", JOB_OPTIONS, ids=lambda option: option.name)


def options_of(line: str) -> dict[str, Any]:
    """The keywords of the API that a command line stands for."""
    action: Any = parse(line.split())
    keywords: dict[str, Any] = action.keywords["options"]
    return keywords


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_takes_the_options_of_a_job(command: str) -> None:
    """Each command that takes a model has all options of the table, with their help."""
    helps = {parameter.name: parameter.help for parameter in build_command(command).params}
    assert all(helps[option.name] == option.help for option in JOB_OPTIONS)


@each_option
def test_the_command_line_gives_what_python_takes(option: JobOption) -> None:
    """A flag is true, a count a number, and each other value the text or the texts."""
    assert option.name in JOB
    if option.kind is OptionKind.FLAG:
        assert options_of(f"estimate {option.flag}")[option.name] is True
    elif option.kind is OptionKind.COUNT:
        assert options_of(f"estimate {option.flag} 2")[option.name] == 2
    elif option.kind in (OptionKind.CHOICE, OptionKind.TEXT):
        assert options_of(f"estimate {option.flag} x")[option.name] == "x"
    else:
        assert options_of(f"estimate {option.flag} x {option.flag} y")[option.name] == ["x", "y"]
    assert options_of("estimate")[option.name] is None


def test_a_flag_that_another_option_turns_on_can_be_turned_off() -> None:
    """`--no-grad-scaler` is false and not merely absent."""
    assert options_of("estimate --no-grad-scaler")["grad_scaler"] is False


@each_option
def test_shells_complete_the_choices(option: JobOption) -> None:
    """The option completes by its name, and its choices as its value."""
    assert option.flag in [candidate.word for candidate in candidates(["estimate"], option.flag)]
    words = [candidate.word for candidate in candidates(["estimate", option.flag], "")]
    if option.choices is not None:
        assert words == [*map(str, option.choices), *option.more_words]
    elif option.kind is not OptionKind.FLAG:
        assert words == []


def test_methods_are_those_of_the_estimators() -> None:
    """The table names methods that there are."""
    named = {method for option in JOB_OPTIONS for method in option.methods}
    assert named == {str(method) for method in Method} - {"trace"}
