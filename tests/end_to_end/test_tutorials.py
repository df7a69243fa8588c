"""A tutorial is a session: its files and commands, in one folder, print what the page shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs/index.md", *sorted((ROOT / "docs/tutorials").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PROGRAMS = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
FILE = re.compile(r"# ([\w./]+\.\w+)\n")


def sessions(page: Path) -> list[tuple[str, list[str]]]:
    """Return each command of a page with the lines that the page shows below it."""
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    parts = [
        part for kind, body in blocks if kind == "console" for part in re.split(r"^\$ ", body, flags=re.M)
    ]
    lines = [part.splitlines() for part in parts if part]
    return [(command, shown) for command, *shown in lines]


def missing(shown: list[str], printed: list[str]) -> list[str]:
    """Return the shown lines that are not printed in this order; `...` stands for lines left out."""
    rest = iter(printed)
    return [line for line in shown if line != "..." and not any(line == other.rstrip() for other in rest)]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_prints_what_it_shows(page: Path, tmp_path: Path) -> None:
    """Every command of the page prints the lines below it, in their order."""
    for _, body in BLOCK.findall(page.read_text(encoding="utf-8")):
        if file := FILE.match(body):
            (tmp_path / file[1]).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file[1]).write_text(body, encoding="utf-8")
    wrong = {}
    for command, shown in sessions(page):
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=os.environ | {"PATH": PROGRAMS},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if lines := missing(shown, done.stdout.splitlines()):
            wrong[command] = (lines, done.stderr)
    assert sessions(page) and wrong == {}


def test_lines_have_to_come_in_their_order() -> None:
    """A line that is not printed, and one that is printed before another, are missing."""
    assert missing(["a", "...", "c"], ["a", "b", "c"]) == []
    assert missing(["c", "a"], ["a", "b", "c"]) == ["a"]
    assert missing(["d"], ["a"]) == ["d"]
