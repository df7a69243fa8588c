"""Add linked files of the repository and the reference to the site that mkdocs makes of docs/.

The pages of docs/ are written for whoever reads them in the repository, where a link may lead anywhere. A
link that leaves docs/ brings its file into the site, below `repository/`; where that is a page, it brings
along what it links.
"""

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

from benchmarks.docs.reference import reference_pages
from benchmarks.docs.tutorial_notebook import notebook_page

ROOT = Path(__file__).parents[2]
DOCS = "docs/"
OUTSIDE = "repository/"  # of the site: files from outside of docs/
MOVED = {"README.md": "overview.md"}  # a README would be the first page of its folder
ORIGINS = {address: name for name, address in MOVED.items()}
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?\)")
EMPTY_HEADER = re.compile(r"<th([^>]*)>\s*</th>")
FENCE = re.compile(r"^(`{3,}.*?^`{3,}$)", re.MULTILINE | re.DOTALL)
# In the repository a list may follow a line of text, and what lies within an item is indented by two.
UNSPACED_LIST = re.compile(r"^((?!\s*(?:[-*] |\d+\. )|\||#|<)\S.*)\n(?=(?:[-*]|1\.) )", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Add the notebook, the pages of the reference, and the files that pages link to."""
    notebook, pictures = notebook_page()
    for name, picture in pictures.items():
        files.append(File.generated(config, f"tutorials/{name}", content=picture))
    for name, text in {"tutorials/notebook.md": notebook, **reference_pages()}.items():
        files.append(File.generated(config, name, content=text))
    waiting = ["README.md"]
    waiting += [page for path in (ROOT / DOCS).rglob("*.md") for page in linked_files(_name(path))]
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name not in seen and not name.startswith(DOCS):
            seen.add(name)
            files.append(File.generated(config, address(name), abs_src_path=str(ROOT / name)))
            waiting += linked_files(name)
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Return a page's text with links as the site has them, and lists as its Markdown wants them."""
    source = page.file.src_uri
    origin = ORIGINS.get(source) or (
        source.removeprefix(OUTSIDE) if source.startswith(OUTSIDE) else DOCS + source
    )
    parts = FENCE.split(markdown)
    parts[::2] = [UNSPACED_LIST.sub(r"\1\n\n", _relinked(part, origin)) for part in parts[::2]]
    return "".join(parts)


def on_page_content(html: str, *, page: Any, config: Any, files: Any) -> str:
    """Return a page's HTML without empty headers of columns, which a screen reader would announce."""
    return EMPTY_HEADER.sub(r"<td\1></td>", html)


def linked_files(name: str) -> Iterator[str]:
    """Yield the files that a page of the repository links to; none for what is not a page."""
    if name.endswith(".md"):
        prose = "".join(FENCE.split((ROOT / name).read_text(encoding="utf-8"))[::2])
        for link in LINK.finditer(prose):
            yield _target(link[1], name)


def address(name: str) -> str:
    """Return where the site has a file of the repository."""
    return MOVED.get(name) or (name.removeprefix(DOCS) if name.startswith(DOCS) else OUTSIDE + name)


def _relinked(text: str, origin: str) -> str:
    """Return Markdown of the file `origin` with its links led to where the site has their files."""
    here = posixpath.dirname(address(origin))

    def lead(link: re.Match[str]) -> str:
        return f"]({posixpath.relpath(address(_target(link[1], origin)), here)}{link[2] or ''})"

    return LINK.sub(lead, text)


def _target(link: str, origin: str) -> str:
    """Return the file of the repository that a relative link of another one names."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()
