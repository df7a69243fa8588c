"""What an option of the command line is, and the reading of command lines that nothing is wrong with.

Importing typer takes as long as a plan from kept traces. So it is imported only to explain: for help, and to
say what is wrong with a command line. Whatever is not plainly right is left to it.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, init=False)
class Word:
    """How one value is asked for; `names` with their dashes, or none for the field's own name."""

    names: tuple[str, ...]
    metavar: str | None
    help: str

    def __init__(self, *names: str, metavar: str | None = None, help: str = "") -> None:
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "metavar", metavar)
        object.__setattr__(self, "help", help)


class Option(Word):
    """A value after its name, or a flag."""

    __slots__ = ()


class Argument(Word):
    """A value by its place."""

    __slots__ = ()


def words_of(command: Callable[..., Any]) -> dict[str, tuple[Any, Word]]:
    """Each parameter of a command with its type and its word."""
    parameters = inspect.signature(command).parameters.values()
    return {
        parameter.name: (parameter.annotation.__origin__, parameter.annotation.__metadata__[0])
        for parameter in parameters
    }


def read_plainly(command: Callable[..., Any], arguments: Sequence[str]) -> dict[str, Any] | None:
    """The values of a command's parameters; None for anything but known options with their values."""
    words = words_of(command)
    values = {name: found.default for name, found in inspect.signature(command).parameters.items()}
    known = spellings(words)
    places = [name for name, (_, word) in words.items() if isinstance(word, Argument)]
    waiting = list(arguments)[::-1]
    while waiting:
        text = waiting.pop()
        if text == "--":
            if not places:
                return None
            for rest in waiting[::-1]:
                if not _put(values, words, places[0], rest):
                    return None
            break
        spelled, equals, value = text.partition("=")
        if not text.startswith("-"):
            if not places or not _put(values, words, places[0], text):
                return None
            continue
        if spelled not in known:
            return None
        name, flag = known[spelled]
        if flag is not None:
            if equals:
                return None
            values[name] = flag
            continue
        if not equals:
            if not waiting or waiting[-1].startswith("-"):
                return None
            value = waiting.pop()
        _put(values, words, name, value)
    return values


def spellings(words: dict[str, tuple[Any, Word]]) -> dict[str, tuple[str, bool | None]]:
    """Each way to name an option: its parameter, and the value that a flag sets."""
    found: dict[str, tuple[str, bool | None]] = {}
    for name, (kind, word) in words.items():
        if isinstance(word, Argument):
            continue
        is_flag = kind in (bool, bool | None)
        for spelling in word.names or ("--" + name.replace("_", "-"),):
            on, _, off = spelling.partition("/")
            found[on] = (name, True if is_flag else None)
            if off:
                found[off] = (name, False)
    return found


def _put(values: dict[str, Any], words: dict[str, tuple[Any, Word]], name: str, value: str) -> bool:
    """Set a value, or add it where there may be many; False for a second value in one place."""
    kind, word = words[name]
    if kind == list[str] | None:
        values[name] = [*(values[name] or ()), value]
        return True
    if isinstance(word, Argument) and values[name] is not None:
        return False
    values[name] = value
    return True
