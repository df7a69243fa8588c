"""Texts of others on a terminal and in a spreadsheet: shown, and not obeyed."""

import csv
import io
from pathlib import Path

import pytest

from planner._support.printable import harmless_cell, printable, shortened
from planner.cli import run
from planner.errors import UsageError
from planner.report.document import Bullets, Cell, Column, Document, Entry, Headline, Table, printable_parts
from planner.report.plain import render_plain

RED = "\x1b[31m"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        (f"{RED}red", r"\x1b[31mred"),
        ("two\nlines\tand", "two lines and"),
        ("\x9b31m \x07 \r", r"\x9b31m \x07 \r"),
        ("\u202egnirts \u2066", r"\u202egnirts \u2066"),
        ("é 模型 \u00a0 −", "é 模型 \u00a0 −"),
    ],
)
def test_characters_that_a_terminal_obeys_are_spelled_out(text: str, shown: str) -> None:
    """Escapes, bells and changes of direction are spelled out; letters of any language stay."""
    assert printable(text) == shown


def test_a_document_is_printable_in_all_its_parts() -> None:
    """Each text of a report, wherever it stands, is shown and not obeyed."""
    document = Document.of(
        [Headline([RED, Entry(RED, RED)], "good"), Bullets(RED, [RED])],
        [Table([Column(RED)], [[Cell(RED, detail=RED)], [RED]])],
    )
    text = render_plain(printable_parts(document))
    assert "\x1b" not in text and text.count(r"\x1b[31m") == 9


def test_messages_are_short() -> None:
    """A message of a megabyte keeps its beginning, which names the place, and its end, the remedy."""
    message = str(UsageError(f"here: {'x' * 10**6}; do this"))
    assert len(message) == 10_005
    assert message.startswith("here: xxx") and message.endswith("xxx; do this")
    assert shortened("short") == "short"


def test_names_of_a_model_reach_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model whose modules have escapes for names is explained without one."""
    file = tmp_path / "net.py"
    file.write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.add_module('\\x1b[31mred', nn.Linear(1024, 1024))\n"
        "    def forward(self, x):\n"
        "        return getattr(self, '\\x1b[31mred')(x)\n"
    )
    words = ["--input", "1024", "--target", "scalar:int64", "--batch", "2", "--no-cache"]
    assert run(["explain", "--model", f"{file}:Net", *words]) == 0
    shown = capsys.readouterr()
    assert r"\x1b[31mred" in shown.out
    assert "\x1b" not in shown.out + shown.err


@pytest.mark.slow
def test_a_cell_is_no_formula(tmp_path: Path) -> None:
    """A name in a sweep that a spreadsheet would compute has a quote before it in the CSV."""
    path, table = tmp_path / "sweep.yaml", tmp_path / "cells.csv"
    path.write_text(
        "about: a\nmodels: [{model: conv_pair, name: '=1+1'}]\nrecipes: {'@sum': {}}\ngpus: [L4]\n"
    )
    assert run(["sweep", str(path), "--csv", str(table)]) == 0
    (row,) = csv.DictReader(io.StringIO(table.read_text()))
    assert (row["model"], row["recipe"]) == ("'=1+1", "'@sum")
    assert int(row["max_batch"]) > 0
    assert [harmless_cell(text) for text in ("+1", "-1", "a=1")] == ["'+1", "'-1", "a=1"]
    assert harmless_cell(-1) == -1
