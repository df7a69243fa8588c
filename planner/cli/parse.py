"""From the words of a command line to a command that is ready to run; the module that knows typer's ways."""

from typing import Any

import typer

from planner.cli.calibrate import calibrate_command
from planner.cli.compare import compare_command
from planner.cli.estimate import estimate_command
from planner.cli.max_batch import max_batch_command
from planner.cli.options import Action
from planner.cli.replay import replay_command
from planner.cli.tables import tables_command
from planner.cli.verify import verify_command
from planner.errors import UsageError

# Base of all complaints about a command line: public in click, private in a typer that has click within.
_Complaint: type[Exception] = typer.BadParameter.__mro__[2]


def parse(arguments: list[str]) -> Action:
    """What the arguments ask for; a call for help, or none at all, is answered here. Raises UsageError."""
    app = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        help="How large a batch of a PyTorch model fits a GPU, told without the GPU.",
        epilog="Exit codes: 0 done; 1 the answer is no; 2 wrong usage; 3 the model fails; 4 a data file is "
        "broken; 5 a GPU is needed; 70 an error of the planner.",
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    app.command("max-batch")(max_batch_command)
    app.command("estimate")(estimate_command)
    app.command("compare")(compare_command)
    app.command("replay")(replay_command)
    app.command("tables")(tables_command)
    app.command("calibrate")(calibrate_command)
    app.command("verify")(verify_command)
    try:
        parsed = app(arguments or ["--help"], prog_name="planner", standalone_mode=False)
    except _Complaint as complaint:
        raise UsageError(_in_our_words(complaint)) from complaint
    if parsed == 130:  # so typer tells of an interrupt
        raise KeyboardInterrupt
    return parsed if callable(parsed) else lambda: int(parsed or 0)


def _in_our_words(complaint: Any) -> str:
    """One line that names the command whose help tells more."""
    context = getattr(complaint, "ctx", None)
    command = context.command_path if context else "planner"
    message = complaint.format_message().rstrip(".")
    see = " See" if message.endswith("?") else "; see"
    return f"{message[:1].lower()}{message[1:]}{see} {command} --help"
