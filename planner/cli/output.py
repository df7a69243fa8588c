"""Standard output: the answer and nothing else. Standard error: one line of progress on a terminal."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, Protocol, TextIO, cast

from planner.cli.options import OutputOptions
from planner.errors import UnsavedError
from planner.plan import Tell

WIDEST = 120  # columns of a report on a terminal: longer lines are hard to follow


class Result(Protocol):
    """An answer: its text is the report."""

    def to_dict(self) -> dict[str, Any]:
        """Its JSON."""


def answer(result: Result, output: OutputOptions) -> None:
    """Print a report, or its JSON on one line; on a terminal with rich's tables where there are any."""
    if output.json:
        print(json.dumps(result.to_dict()), flush=True)
    elif hasattr(result, "__rich__") and _is_drawn_on(sys.stdout):
        _draw(result)
    else:
        print(result, flush=True)


def _is_drawn_on(stream: TextIO) -> bool:
    """Whether a stream ends on a terminal that shows more than letters; a pipe gets the plain text."""
    letters_only = os.environ.get("TERM", "") in ("dumb", "unknown")
    return stream.isatty() and not letters_only and (stream.encoding or "").lower().startswith("utf")


def _draw(result: Result) -> None:
    """By rich, which honours NO_COLOR (https://no-color.org) and the width of the terminal."""
    from rich.console import Console

    console = Console(highlight=False, emoji=False, markup=False)
    console.width = min(console.width, WIDEST)
    console.print(result)


@contextmanager
def answering_first(output: OutputOptions) -> Iterator[None]:
    """Print the answer that is there before the error that it could not be kept goes its way."""
    try:
        yield
    except UnsavedError as error:
        answer(cast(Result, error.result), output)
        raise


@contextmanager
def working() -> Iterator[Tell]:
    """Keep what a model prints off standard output, and show on a terminal what is being done.

    Gives a function that shows a line in place of the one before; none is left in the end.
    """
    with redirect_stdout(sys.stderr):
        if sys.stderr.isatty():
            with _rewriting() as tell:
                yield tell
        else:
            yield lambda line: None


@contextmanager
def _rewriting() -> Iterator[Tell]:
    width = 0

    def tell(line: str) -> None:
        nonlocal width
        print(f"\r{line:<{width}}", end="", file=sys.stderr, flush=True)
        width = len(line)

    try:
        yield tell
    finally:
        print(f"\r{'':<{width}}\r", end="", file=sys.stderr, flush=True)
