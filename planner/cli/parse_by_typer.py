"""Help, and what is wrong with a command line: the module that knows typer's ways."""

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from planner._support.versions import installed_version
from planner.cli.options import Action
from planner.cli.parse import COMMANDS, find_command
from planner.cli.words import Argument, words_of
from planner.errors import UsageError

_TOLD = {"planner": "gpu-batch-planner", "torch": "torch", "torchvision": "torchvision"}  # with --version
# Base of all complaints about a command line: public in click, private in a typer that has click within.
_Complaint: type[Exception] = typer.BadParameter.__mro__[2]


def parse_by_typer(arguments: list[str]) -> Action:
    """What the arguments ask for; a call for help, or none at all, is answered here. Raises UsageError."""
    app = typer.Typer(
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        help="Find the largest batch of a PyTorch model that fits a GPU, without a GPU.",
        epilog="Exit codes: 0 done; 1 the answer is no; 2 wrong usage; 3 the model fails; 4 a data file is "
        "broken; 5 a GPU is needed; 70 an error of the planner.",
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    app.callback()(_whole)
    for name in COMMANDS:
        app.command(name)(_in_typers_words(find_command(name)))
    try:
        parsed = app(arguments or ["--help"], prog_name="planner", standalone_mode=False)
    except _Complaint as complaint:
        raise UsageError(_in_our_words(complaint)) from complaint
    if parsed == 130:  # so typer tells of an interrupt
        raise KeyboardInterrupt
    return parsed if callable(parsed) else lambda: int(parsed or 0)


def _tell_version(is_asked: bool) -> None:
    if is_asked:
        versions = ((name, installed_version(of)) for name, of in _TOLD.items())
        typer.echo(", ".join(f"{name} {version}" for name, version in versions if version))
        raise typer.Exit


_Version = typer.Option(
    "--version", help="Show the versions and exit.", is_eager=True, callback=_tell_version
)


def _whole(version: Annotated[bool, _Version] = False) -> None:
    """Options that need no command."""


def _in_typers_words(command: Callable[..., Action]) -> Callable[..., Action]:
    """The command with parameters as typer reads them."""

    def collect(**values: Any) -> Action:
        return command(**values)

    signature = inspect.signature(command)
    annotations = {}
    for name, (kind, word) in words_of(command).items():
        make = typer.Argument if isinstance(word, Argument) else typer.Option
        places = () if isinstance(word, Argument) else word.names
        annotations[name] = Annotated[kind, make(*places, metavar=word.metavar, help=word.help)]
    parameters = [
        parameter.replace(annotation=annotations[name]) for name, parameter in signature.parameters.items()
    ]
    collect.__doc__, collect.__annotations__ = command.__doc__, annotations
    collect.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return collect


def _in_our_words(complaint: Any) -> str:
    """One line that names the command whose help tells more."""
    context = getattr(complaint, "ctx", None)
    command = context.command_path if context else "planner"
    message = complaint.format_message().rstrip(".")
    see = " See" if message.endswith("?") else "; see"
    return f"{message[:1].lower()}{message[1:]}{see} {command} --help"
