"""Read a table of a TOML file as entries of `strict_yaml`, each with its line number.

`tomllib` gives values without positions. A statement of TOML (a heading, or a key with its value) is valid by
itself and begins on a new line, so each statement is parsed alone once more to find the keys that it defines.
"""

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner._support.bounded_read import read_text
from planner._support.strict_yaml import MAX_DEPTH, Entry
from planner.errors import DataFileError

if TYPE_CHECKING:
    import yaml

LARGEST_FILE_BYTES = 2**20
_MOST_DOTS = 2_000  # most dots in a line
_MOST_PARSED = 2**20  # characters in trial parses of multi-line statements, after which fewer ends are tried

_Path = tuple[str | int, ...]  # keys, and the indices of tables in an array of tables
_ENDINGS = ("]", "}", '"""', "'''")  # the last line of a multi-line value contains one of these marks
_TOO_DEEP = "nested too deeply, or in values of too many lines"
_TAGS = {str: "str", bool: "bool", int: "int", float: "float"}


def read_toml_table(path: Path, table: Sequence[str]) -> Entry | None:
    """Return a table of a TOML file as an entry, or None if the file has no such table.

    Raises DataFileError.
    """
    try:
        text = read_text(path, LARGEST_FILE_BYTES)
        if any(line.count(".") > _MOST_DOTS for line in text.split("\n")):
            raise RecursionError  # tomllib takes quadratic time for a key of that many parts
        value: Any = tomllib.loads(text)
        if is_deeper(value, MAX_DEPTH):
            raise RecursionError
    except OSError as error:
        raise DataFileError(f"{path}: not readable ({error.strerror or error})") from error
    except RecursionError:
        raise DataFileError(f"{path}: {_TOO_DEEP}") from None
    except ValueError as error:  # not TOML, or not UTF-8
        raise DataFileError(f"{path}: not TOML ({error})") from error
    for key in table:
        value = value.get(key) if isinstance(value, Mapping) else None
    if value is None:
        return None
    try:
        lines = _lines(text)
    except RecursionError:
        raise DataFileError(f"{path}: {_TOO_DEEP}") from None
    place = tuple(table)
    return Entry(path, ".".join(table), lines.get(place, 1), _node(value, place, lines))


def is_deeper(value: object, depth: int) -> bool:
    """Return whether a value contains mappings or lists at more than `depth` levels below itself."""
    level = [value]
    for _ in range(depth + 1):
        inner = [one.values() if isinstance(one, Mapping) else one for one in level]
        level = [
            part
            for parts in inner
            if not isinstance(parts, str) and isinstance(parts, Iterable)
            for part in parts
            if isinstance(part, Mapping | list)
        ]
        if not level:
            return False
    return True


def _lines(text: str) -> dict[_Path, int]:
    """Return the line number, from 1, at which each key's statement begins, by the key's path."""
    lines: dict[_Path, int] = {}
    tables: dict[_Path, int] = {}  # number of tables already read of each array of tables
    heading: _Path = ()
    for number, statement in _statements(text):
        defined = tomllib.loads(statement)
        if statement.lstrip().startswith("["):
            heading = _heading(defined, tables)
            for length in range(1, len(heading) + 1):
                lines.setdefault(heading[:length], number)
        else:
            for path in _paths(defined, heading):
                lines.setdefault(path, number)
    return lines


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Yield the number of the first line, from 1, and the text of each statement in a TOML text.

    Raises RecursionError if statements of several lines need too many trial parses.
    """
    lines, start, parsed = text.split("\n"), 0, 0
    while start < len(lines):
        end, opened, length = start + 1, _opened(lines[start]), len(lines[start])
        while end < len(lines):
            # After many tries, only ends at which all brackets are closed are tried; strings may hold some.
            if end == start + 1 or (_may_end(lines[end - 1]) and (opened <= 0 or parsed < _MOST_PARSED)):
                parsed += length if end > start + 1 else 0
                if parsed > 4 * _MOST_PARSED:
                    raise RecursionError
                if _is_valid("\n".join(lines[start:end])):
                    break
            opened, length, end = opened + _opened(lines[end]), length + len(lines[end]), end + 1
        yield start + 1, "\n".join(lines[start:end])
        start = end


def _opened(line: str) -> int:
    """Return the number of opening brackets in a line, minus the number of closing brackets."""
    return line.count("[") + line.count("{") - line.count("]") - line.count("}")


def _is_valid(statement: str) -> bool:
    try:
        tomllib.loads(statement)
    except tomllib.TOMLDecodeError:
        return False
    return True


def _may_end(line: str) -> bool:
    return any(mark in line for mark in _ENDINGS)


def _heading(defined: Any, tables: dict[_Path, int]) -> _Path:
    """Return the path of the table that a heading opens, and count the table in `tables`.

    `tables` counts the tables of each array of tables.
    """
    path: _Path = ()
    while defined:
        ((key, defined),) = defined.items()
        path = (*path, key)
        if isinstance(defined, list):
            tables[path] = tables.get(path, 0) + 1
            defined = defined[0]
        if path in tables:
            path = (*path, tables[path] - 1)
    return path


def _paths(value: object, path: _Path) -> Iterator[_Path]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield (*path, key)
            yield from _paths(inner, (*path, key))


def _node(value: object, path: _Path, lines: Mapping[_Path, int]) -> "yaml.Node":
    """Convert a value to a YAML node with the line in `lines` of its path or the nearest enclosing path."""
    import yaml

    line = next(lines[path[:length]] for length in range(len(path), -1, -1) if path[:length] in lines)
    mark = yaml.Mark("", 0, line - 1, 0, None, 0)
    if isinstance(value, Mapping):
        pairs = []
        for key, inner in value.items():
            node = _node(inner, (*path, key), lines)
            pairs.append((yaml.ScalarNode(_tag("str"), key, node.start_mark), node))
        return yaml.MappingNode(_tag("map"), pairs, mark)
    if isinstance(value, list):
        items = [_node(item, (*path, index), lines) for index, item in enumerate(value)]
        return yaml.SequenceNode(_tag("seq"), items, mark)
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return yaml.ScalarNode(_tag(_TAGS.get(type(value), "timestamp")), text, mark)


def _tag(name: str) -> str:
    return f"tag:yaml.org,2002:{name}"
