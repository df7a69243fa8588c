"""Read YAML files strictly: each error names the file, the line and the key.

Every value has one form. Unknown, missing and repeated keys are errors, and so is a scalar that YAML takes
for a number or a truth value only by accident. YAML itself is imported only when a file is read.
"""

from collections.abc import Iterable, Iterator
from itertools import count
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from planner._support.bounded_read import read_text
from planner._support.conversion import ConversionError, Text, convert, shown
from planner.errors import DataFileError

if TYPE_CHECKING:
    import yaml

T = TypeVar("T")
MAX_DEPTH = 100  # levels of nesting; the planner's files have 6
LARGEST_FILE_BYTES = 4 * 2**20  # calibrations may be that large; other files are far smaller
MOST_MARKS = 1_000_000  # most characters that may begin a value; a value takes half a kB of memory
MAX_VALUES = 200_000  # most values with aliases expanded; aliases of aliases of lists could make billions


class Entry(msgspec.Struct, frozen=True):
    """A value in a YAML file with its position."""

    path: Path
    key: str  # keys on the path to the value, joined by dots; "" for the whole file
    line: int  # line of the key or the list's item, counted from 1
    node: "yaml.Node"

    def broken(self, what: str) -> DataFileError:
        """Return an error that names the file, line and key of the value, and the problem `what`."""
        key = f", {self.key}" if self.key else ""
        return DataFileError(f"{self.path} line {self.line}{key}: {what}")

    def convert(self, kind: type[T], **given: Any) -> T:
        """Convert the value to the type `kind`, after adding the keys `given` to it if it is a mapping.

        The value is converted as by `conversion.convert`. Raises DataFileError if the value cannot be
        converted, or has a key of `given`.
        """
        value = self.plain()
        if given:
            for key, entry in self.mapping().items():
                if key in given:
                    raise entry.broken("unknown key")
            value |= given
        try:
            return convert(value, kind)
        except ConversionError as error:
            place: Entry = self
            for step in error.path:
                place = place.mapping()[step] if isinstance(step, str) else place.items()[step]
            unquoted = "expected a string" in error.what and not place.node.tag.endswith(":str")
            hint = "; write it in quotes, without which YAML reads another type" if unquoted else ""
            raise place.broken(error.what + hint) from None

    def plain(self) -> Any:
        """Convert the value to the basic types of JSON, or to `Unusual` if a scalar has none of them.

        Raises DataFileError if aliases make too many levels or values.
        """
        try:
            return _plain(self, count(1), 0)
        except RecursionError:
            problem = f"aliases make more than {MAX_DEPTH} levels or {MAX_VALUES:,} values"
            raise self.broken(f"{problem}; write the values out") from None

    def children(self, required: Iterable[str], optional: Iterable[str] = ()) -> dict[str, "Entry"]:
        """Return the values of a mapping as entries, by key, after a check of the keys.

        Raises DataFileError if a required key is missing, or a key is neither `required` nor `optional`.
        """
        required, known = tuple(required), (*required, *optional)
        entries = self.mapping()
        for key, entry in entries.items():
            if key not in known:
                raise entry.broken(f"unknown key; known are {', '.join(known)}")
        missing = [key for key in required if key not in entries]
        if missing:
            raise self.broken(f"missing {', '.join(missing)}")
        return entries

    def mapping(self) -> dict[str, "Entry"]:
        """Return the values of a mapping as entries, by key.

        Raises DataFileError if the value is no mapping, or if a key is no scalar or is repeated.
        """
        import yaml

        if not isinstance(self.node, yaml.MappingNode):
            raise self.broken(f"expected keys with values, got {shown(self.plain())}")
        entries: dict[str, Entry] = {}
        for key_node, value_node in self.node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else "?"
            dotted = f"{self.key}.{key}" if self.key else key
            entry = Entry(self.path, dotted, _line(key_node), value_node)
            if key in entries or key == "?":
                raise entry.broken("each key must be one plain string that occurs once")
            entries[key] = entry
        return entries

    def items(self) -> list["Entry"]:
        """Return the items of a list as entries. Raises DataFileError if the value is no list."""
        import yaml

        if not isinstance(self.node, yaml.SequenceNode):
            raise self.broken(f"expected a list, got {shown(self.plain())}")
        return [
            Entry(self.path, f"{self.key}[{index}]", _line(node), node)
            for index, node in enumerate(self.node.value)
        ]

    def text(self) -> str:
        """Return the value as a string. Raises DataFileError if the value is no string or is blank."""
        text: Any = Text
        return str(self.convert(text))

    def is_word(self, word: str) -> bool:
        """Return whether the value is a scalar whose text equals `word`."""
        return bool(self.node.value == word)


class Unusual(msgspec.Struct, frozen=True):
    """A YAML scalar of an unusual form, such as a date, 1:30, 0x10, .nan or yes.

    Usual scalars are strings, decimal numbers, true, false and null.
    """

    text: str

    def __str__(self) -> str:
        return repr(self.text)


def read_entry(path: Path) -> Entry:
    """Read a YAML file as one entry. Raises DataFileError unless the file is exactly one YAML document."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        text = read_text(path, LARGEST_FILE_BYTES)
        if sum(map(text.count, ",:\n[{")) > MOST_MARKS:
            raise DataFileError(f"{path}: holds more than {MOST_MARKS:,} values")
        if _may_be_deep(text):
            _refuse_depth(path, text, loader)
        node = yaml.compose(text, Loader=loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise DataFileError(f"{path} line {line}: not YAML ({error.problem})") from error
    except OSError as error:
        raise DataFileError(f"{path}: not readable ({error.strerror or error})") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise DataFileError(f"{path}: not readable ({' '.join(str(error).split())})") from error
    if node is None:
        raise DataFileError(f"{path} line 1: the file is empty")
    return Entry(path, "", _line(node), node)


def _may_be_deep(text: str) -> bool:
    """Return whether a YAML text may nest deeper than MAX_DEPTH.

    The depth is bounded by counts of brackets, dashes and indents.
    """
    marks = sum(map(text.count, "[{"))
    return marks > MAX_DEPTH or any(
        line.count("-") + line.count("?") + len(line) - len(line.lstrip()) > MAX_DEPTH
        for line in text.splitlines()
    )


def _refuse_depth(path: Path, text: str, loader: Any) -> None:
    """Raise DataFileError if a YAML text nests deeper than MAX_DEPTH, before it is composed.

    Composing takes a level of the C stack for each level of the file, without a bound: PyYAML 6.0 with
    libyaml crashes at some 50,000 levels. Parsing takes no stack.
    """
    import yaml

    depth = 0
    for event in yaml.parse(text, Loader=loader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            line = event.start_mark.line + 1 if event.start_mark else 1
            raise DataFileError(f"{path} line {line}: nested more than {MAX_DEPTH} levels deep")


def _line(node: "yaml.Node") -> int:
    return node.start_mark.line + 1


def _plain(entry: Entry, values: Iterator[int], depth: int) -> Any:
    if depth > MAX_DEPTH or next(values) > MAX_VALUES:
        raise RecursionError
    kind = entry.node.id  # type: ignore[attr-defined]  # the stubs lack it
    if kind == "scalar":
        return _scalar(entry.node.tag.rpartition(":")[2], entry.node.value)
    if kind == "sequence":
        return [_plain(item, values, depth + 1) for item in entry.items()]
    return {key: _plain(value, values, depth + 1) for key, value in entry.mapping().items()}


def _scalar(tag: str, text: str) -> Any:
    if tag == "str":
        return text
    if tag == "null":
        return None
    if tag == "bool" and text in ("true", "false"):
        return text == "true"
    try:
        if tag == "int":
            return int(text)
        if tag == "float" and isfinite(float(text)):
            return float(text)
    except ValueError:  # YAML's octal, hexadecimal and base-60 numbers, which nobody intends
        pass
    return Unusual(text)
