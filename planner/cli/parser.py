"""Parse the command line with typer.

The result is a command that is ready to run.
"""

import re
from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperCommand
from typer.main import get_command

from planner._support.versions import installed_version
from planner.cli.options import Action
from planner.errors import UsageError

COMMANDS = (
    *("max-batch", "estimate", "gpus", "devices", "advise", "explain", "compare", "replay", "tables"),
    *("calibrate", "verify", "cache", "sweep", "run", "serve", "max-size", "check", "report", "record"),
    "diagnose",
)
_VERSIONS = {"planner": "gpu-batch-planner", "torch": "torch", "torchvision": "torchvision"}
# Base class of all errors about a command line: public in click, private in a typer that contains click.
_CommandLineError: type[Exception] = typer.BadParameter.__mro__[2]
_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def parse(arguments: list[str]) -> Action:
    """Parse a command line into a function that runs its command. Prints help if asked. Raises UsageError."""
    arguments = _with_mode(arguments)
    name = arguments[0] if arguments and arguments[0] in COMMANDS else None
    try:
        if name is None:
            parsed = _call(build_group(), "planner", arguments or ["--help"])
        else:  # building all commands would take longer
            parsed = _call(build_command(name), f"planner {name}", arguments[1:])
    except _CommandLineError as error:
        raise UsageError(_one_line(error, name)) from error
    return parsed if callable(parsed) else lambda: int(parsed or 0)


def _call(command: Any, name: str, arguments: list[str]) -> Any:
    """Invoke a command of typer, and return the command's result, or the exit code if it raises typer.Exit.

    The command's own `main` would swallow an interrupt.
    """
    try:
        with command.make_context(name, arguments) as context:
            return command.invoke(context)
    except typer.Exit as ended:
        return ended.exit_code


def _with_mode(arguments: list[str]) -> list[str]:
    """Insert the default mode after each `--compile` without a mode."""
    own = arguments.index("--") if "--" in arguments else len(arguments)
    given: list[str] = []
    for position, argument in enumerate(arguments):
        given.append(argument)
        follower = arguments[position + 1] if position + 1 < own else "--"
        if argument == "--compile" and position < own and follower.startswith("-"):
            given.append("default")
    return given


def find_command(name: str) -> Callable[..., Action]:
    """Import a command's module and return its function."""
    module = name.replace("-", "_")
    commands = import_module(f"planner.cli.commands.{module}")
    command: Callable[..., Action] = getattr(commands, f"{module}_command")
    return command


def build_command(name: str) -> Any:
    """Return typer's parser of one command."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(name, cls=_Command, context_settings=_SETTINGS)(find_command(name))
    return get_command(app)


def build_group() -> Any:
    """Return typer's parser of the whole command line."""
    app = typer.Typer(
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        help="Find the largest batch of a PyTorch model that fits a GPU, without a GPU.",
        epilog="Exit codes: 0 done; 1 the answer is no; 2 wrong usage; 3 the model fails; 4 a data file is "
        "broken; 5 a GPU is needed; 70 an error of the planner.",
        context_settings=_SETTINGS,
    )
    app.callback()(_root)
    for name in COMMANDS:
        app.command(name, cls=_Command)(find_command(name))
    return get_command(app)


class _Command(TyperCommand):
    """A typer command that leaves the values of its options as strings.

    typer's conversion imports pydantic, which takes 60 ms.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        values, rest, _ = self.make_parser(ctx).parse_args(args=list(args))
        if "help" in values or rest:
            return super().parse_args(ctx, args)  # prints the help, or refuses the rest
        ctx.params = {parameter.name: _value(values.get(parameter.name)) for parameter in self.params}
        return []


def _value(value: Any) -> Any:
    """Return a parsed value, with a tuple as a list, and with an empty list or click's marker as None."""
    if isinstance(value, tuple):
        value = list(value)
    return value if value != [] and isinstance(value, str | bool | list) else None


def _print_versions(is_given: bool) -> None:
    if is_given:
        versions = ((name, installed_version(package)) for name, package in _VERSIONS.items())
        typer.echo(", ".join(f"{name} {version}" for name, version in versions if version))
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the versions and exit.", is_eager=True, callback=_print_versions
        ),
    ] = False,
) -> None:
    """Declare the options that need no command."""


def _one_line(error: Any, name: str | None) -> str:
    """Return an error of the command line as one line that refers to the command's help."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context else f"planner {name}" if name else "planner"
    message = error.format_message().rstrip(".")
    script = re.match(r"Got unexpected extra argument.*\((\S+\.py\S*)", message)
    if script is not None:
        file = script[1].rstrip(")")
        name = file if ":" in file else f"{file}:NAME"
        return f"{file}: write --model {name} for a model or training step of a file; see {command} --help"
    extra = re.match(r"Got unexpected extra argument\S* \((.+)\)", message)
    parameters = context.command.params if context is not None else ()
    takes_file = any(one.param_type_name == "argument" and one.metavar == "FILE" for one in parameters)
    if extra is not None and takes_file:
        return f"{command} takes one FILE; remove {extra[1]}; see {command} --help"
    see = " See" if message.endswith("?") else "; see"
    return f"{message[:1].lower()}{message[1:]}{see} {command} --help"
