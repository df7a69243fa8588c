"""Run docs/tutorials/notebook.ipynb from top to bottom and store what its cells print and draw.

    python -m benchmarks.docs.tutorial_notebook

`notebook_page` is the notebook as a page of the site.
"""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "docs/tutorials/notebook.ipynb"


def read() -> Any:
    """Return the notebook as it is stored."""
    return nbformat.read(NOTEBOOK, as_version=4)


def execute(notebook: Any, folder: Path) -> Any:
    """Run all cells of a notebook in a kernel of its own in a folder, and return the notebook."""
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(folder)}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times
        if cell.cell_type == "code":  # what torch's compiler warns of names files of the machine
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def printed(notebook: Any) -> list[str]:
    """Return what each cell of code prints."""
    cells = (cell for cell in notebook.cells if cell.cell_type == "code")
    return ["".join(output.get("text", "") for output in cell.outputs) for cell in cells]


def notebook_page() -> tuple[str, dict[str, bytes]]:
    """Return the notebook as Markdown, and the pictures that it shows, by name."""
    pictures: dict[str, bytes] = {}
    return "\n".join(_parts(pictures)) + "\n", pictures


def _parts(pictures: dict[str, bytes]) -> Iterator[str]:
    for cell in read().cells:
        if cell.cell_type == "markdown":
            yield f"{cell.source}\n"
            continue
        yield f"```python\n{cell.source}\n```\n"
        for output in cell.outputs:
            if "text" in output:
                yield f"```text\n{output.text.rstrip()}\n```\n"
            elif png := output.get("data", {}).get("image/png"):
                name = f"notebook_{len(pictures)}.png"
                pictures[name] = base64.b64decode(png)
                yield f"![What the cell draws]({name})\n"


def main() -> None:
    """Run and store."""
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        notebook = execute(read(), Path(folder))
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    main()
