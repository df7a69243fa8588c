"""From the words of a command line to a command that is ready to run."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from planner.cli.options import Action
from planner.cli.words import read_plainly

COMMANDS = (
    *("max-batch", "estimate", "gpus", "devices", "advise", "explain", "compare", "replay", "tables"),
    *("calibrate", "verify", "cache", "sweep", "run"),
)


def parse(arguments: list[str]) -> Action:
    """What the arguments ask for; a call for help, or none at all, is answered here. Raises UsageError."""
    if arguments and arguments[0] in COMMANDS:
        command = find_command(arguments[0])
        values = read_plainly(command, arguments[1:])
        if values is not None:
            return command(**values)
    from planner.cli.parse_by_typer import parse_by_typer

    return parse_by_typer(arguments)


def find_command(name: str) -> Callable[..., Action]:
    """The command, from the module that is called after it."""
    plain = name.replace("-", "_")
    found: Any = getattr(import_module(f"planner.cli.commands.{plain}"), f"{plain}_command")
    return found  # type: ignore[no-any-return]
