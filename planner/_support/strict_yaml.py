"""YAML files that people write by hand, read strictly: each error names the file, the line and the key.

Every value is wanted in one form and refused in any other; unknown, missing and repeated keys are refused.
YAML itself is imported only when a file is read.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.errors import DataFileError

if TYPE_CHECKING:
    import yaml

DEEPEST = 100  # levels; ours have 6


@dataclass(frozen=True, slots=True)
class Entry:
    """A value in a YAML file that knows where it stands."""

    path: Path
    key: str  # dotted, "" for the whole file
    line: int  # of the key, counted from 1
    node: "yaml.Node"

    def broken(self, what: str) -> DataFileError:
        """The error, to be raised, that something is wrong with this value."""
        key = f", {self.key}" if self.key else ""
        return DataFileError(f"{self.path} line {self.line}{key}: {what}")

    def children(self, required: Iterable[str], optional: Iterable[str] = ()) -> dict[str, "Entry"]:
        """The values of a mapping that has all `required` keys, perhaps some `optional`, and no other."""
        required, known = tuple(required), (*required, *optional)
        found = self.mapping()
        for key, entry in found.items():
            if key not in known:
                raise entry.broken(f"unknown key; known are {', '.join(known)}")
        missing = [key for key in required if key not in found]
        if missing:
            raise self.broken(f"missing {', '.join(missing)}")
        return found

    def mapping(self) -> dict[str, "Entry"]:
        """The values of a mapping whose keys are free texts, each standing there once."""
        import yaml

        if not isinstance(self.node, yaml.MappingNode):
            raise self.broken(f"keys with values are wanted, not {self._shown()}")
        found: dict[str, Entry] = {}
        for key_node, value_node in self.node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else "?"
            dotted = f"{self.key}.{key}" if self.key else key
            entry = Entry(self.path, dotted, _line(key_node), value_node)
            if key in found or key == "?":
                raise entry.broken("a key is one plain text and stands here once")
            found[key] = entry
        return found

    def items(self) -> list["Entry"]:
        """The values of a list."""
        import yaml

        if not isinstance(self.node, yaml.SequenceNode):
            raise self.broken(f"a list is wanted, not {self._shown()}")
        return [
            Entry(self.path, f"{self.key}[{index}]", _line(node), node)
            for index, node in enumerate(self.node.value)
        ]

    def text(self) -> str:
        """A text that is not empty."""
        if not self.node.tag.endswith(":str") or not self.node.value.strip():
            raise self.broken(f"a text is wanted, not {self._shown()}; quote it if it looks like a number")
        return str(self.node.value)

    def choice(self, allowed: Sequence[str]) -> str:
        """One of the texts `allowed`."""
        text = self.text()
        if text not in allowed:
            raise self.broken(f"one of {', '.join(allowed)} is wanted, not {text!r}")
        return text

    def number(self, low: float, high: float) -> float:
        """A number from `low` to `high`, both included."""
        value = math.nan
        if self.node.tag.endswith((":int", ":float")):
            try:
                value = float(self.node.value)
            except ValueError:  # YAML's octal, hexadecimal and base-60 numbers: nobody means them
                value = math.nan
        if not low <= value <= high:
            raise self.broken(f"a number from {low:,} to {high:,} is wanted, not {self._shown()}")
        return value

    def says(self, word: str) -> bool:
        """Whether this is the plain word."""
        return bool(self.node.value == word)

    def _shown(self) -> str:
        return repr(self.node.value) if isinstance(self.node.value, str) else "a list or keys"


def read_entry(path: Path) -> Entry:
    """The whole of a file as one entry.

    Raises DataFileError where the file is missing, empty, not UTF-8 or not one YAML document.
    """
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        text = path.read_text(encoding="utf-8")
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
    """Whether brackets, dashes and indentation could make more levels than anybody writes."""
    marks = sum(map(text.count, "[{"))
    return marks > DEEPEST or any(
        line.count("-") + line.count("?") + len(line) - len(line.lstrip()) > DEEPEST
        for line in text.splitlines()
    )


def _refuse_depth(path: Path, text: str, loader: Any) -> None:
    """Composing takes a level of the C stack for each level of the file, without a bound: PyYAML 6.0 with
    libyaml crashes at some 50,000. Parsing takes none.
    """
    import yaml

    depth = 0
    for event in yaml.parse(text, Loader=loader):
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            line = event.start_mark.line + 1 if event.start_mark else 1
            raise DataFileError(f"{path} line {line}: nested more than {DEEPEST} levels deep")


def _line(node: "yaml.Node") -> int:
    return node.start_mark.line + 1
