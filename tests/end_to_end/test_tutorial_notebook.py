"""The notebook of the documentation runs from top to bottom and prints what is stored in it."""

from pathlib import Path

import pytest

from benchmarks.docs.tutorial_notebook import execute, notebook_page, printed, read


@pytest.mark.slow
def test_the_notebook_prints_what_it_stores(tmp_path: Path) -> None:
    """Run in a kernel of its own, each cell prints what the notebook holds, and one draws the plot."""
    notebook = execute(read(), tmp_path)
    assert printed(notebook) == printed(read())
    assert (tmp_path / "explain.png").read_bytes()[1:4] == b"PNG"


def test_the_page_has_every_cell() -> None:
    """The site's page of the notebook has the source of every cell, what it prints, and its picture."""
    page, pictures = notebook_page()
    cells = read().cells
    assert [cell.source for cell in cells if cell.source not in page] == []
    assert [text for text in printed(read()) if text.rstrip() not in page] == []
    assert [name for name in pictures if f"]({name})" in page] == list(pictures) != []


def test_the_notebook_names_no_machine() -> None:
    """What is stored holds no path of the machine on which it ran."""
    assert [text for text in printed(read()) if "/home/" in text or "site-packages" in text] == []
