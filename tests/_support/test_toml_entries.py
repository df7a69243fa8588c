"""Tables of TOML with the lines of their keys."""

import string
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from planner._support.strict_yaml import Entry
from planner._support.toml_entries import read_toml_table
from planner.errors import DataFileError

TEXT = '''# a comment
[build-system]
requires = [
  "one[extra]",  # ]
  "two",
]

[tool.other]
text = """
[tool.planner]
gpus = 1
"""

[tool.planner]
gpus = ["L4",
  "A10"]
[tool.planner.jobs.first]
model = "resnet50"
"batch" = 3

[tool.planner.jobs."the second"]
model_arg = {depth = 2, wide = true}
a.b = 1.5
[[tool.planner.jobs.list]]
x = 1
[[tool.planner.jobs.list]]
x = 2
'''


def write(folder: Path, text: str) -> Path:
    path = folder / "pyproject.toml"
    path.write_text(text, encoding="utf-8")
    return path


def lines(entry: Entry) -> dict[str, int]:
    """The line of every key of an entry."""
    found = {entry.key: entry.line}
    if entry.node.id == "mapping":  # type: ignore[attr-defined]
        for inner in entry.mapping().values():
            found |= lines(inner)
    if entry.node.id == "sequence":  # type: ignore[attr-defined]
        for inner in entry.items():
            found |= lines(inner)
    return found


def test_each_key_has_the_line_of_its_statement(tmp_path: Path) -> None:
    """Strings and arrays of several lines, quoted and dotted keys, and arrays of tables are followed."""
    table = read_toml_table(write(tmp_path, TEXT), ("tool", "planner"))
    assert table is not None
    found = lines(table)
    assert {key: found[f"tool.planner.{key}"] for key in ("gpus", "jobs.first", "jobs.first.batch")} == {
        "gpus": 15,
        "jobs.first": 17,
        "jobs.first.batch": 19,
    }
    assert found["tool.planner.jobs.the second.model_arg.wide"] == 22
    assert found["tool.planner.jobs.the second.a.b"] == 23
    assert (found["tool.planner.jobs.list[0].x"], found["tool.planner.jobs.list[1].x"]) == (25, 27)
    assert table.plain() == tomllib.loads(TEXT)["tool"]["planner"]


@pytest.mark.parametrize("text", ["", "[tool]\n", "tool = 1\n", "[tool.planner2]\n"])
def test_a_file_without_the_table_has_none(tmp_path: Path, text: str) -> None:
    """A file without the table gives None."""
    assert read_toml_table(write(tmp_path, text), ("tool", "planner")) is None


@pytest.mark.parametrize("content", [b"a = ", b"\xff", b"[a]\n[a]\n", b"x = " + b"[" * 5000])
def test_what_is_not_toml_is_named(tmp_path: Path, content: bytes) -> None:
    """A file that is not TOML is refused with its name."""
    path = tmp_path / "pyproject.toml"
    path.write_bytes(content)
    with pytest.raises(DataFileError, match=r"pyproject\.toml: "):
        read_toml_table(path, ("tool", "planner"))


_NAMES = st.text(string.ascii_lowercase, min_size=1, max_size=3)


@settings(max_examples=60)
@given(st.lists(st.tuples(_NAMES, st.integers(0, 3), st.integers(1, 3)), unique_by=lambda row: row[0]))
def test_the_lines_of_generated_files(rows: list[tuple[str, int, int]]) -> None:
    """Each key stands on the line on which it was written, whatever blanks and lists lie between."""
    from tempfile import TemporaryDirectory

    text, expected = "[tool.planner]\n", {}
    for name, blanks, items in rows:
        text += "\n" * blanks
        expected[name] = text.count("\n") + 1
        text += f"{name} = [{', '.join(['1,  # ]' + chr(10)] * items)}]\n".replace(",, ", ",")
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        text = text.replace(", 1,", " 1,")
    with TemporaryDirectory() as folder:
        table = read_toml_table(write(Path(folder), text), ("tool", "planner"))
    assert table is not None
    assert {key: entry.line for key, entry in table.mapping().items()} == expected
