"""The documentation as a site: it builds without a warning, has every page, and fetches nothing."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import planner
from planner.cli.parser import COMMANDS
from tests.helpers.browser import axe_violations, chromium

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the site; the build is strict, so that a broken link or anchor ends it."""
    folder = tmp_path_factory.mktemp("site")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    words = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


class _Page(HTMLParser):
    """What a page loads when it is opened, its identifiers and its links."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.identifiers: set[str] = set()
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value}
        self.identifiers |= {given["id"]} if "id" in given else set()
        if tag in ("script", "img", "iframe"):
            self.loaded += [given["src"]] if "src" in given else []
        elif tag == "link":
            self.loaded += [given["href"]] if given.get("rel") != "canonical" else []
        elif tag == "a" and "href" in given:
            self.links.append(given["href"])


@pytest.mark.slow
def test_every_page_is_in_the_navigation(site: Path) -> None:
    """The first page's navigation leads to every page of docs/."""
    links = set(_Page(site / "index.html").links)
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert {page.as_posix() for page in pages} - links == set()


@pytest.mark.slow
def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    """Scripts, styles, fonts and pictures are the site's own."""
    pages = {path.relative_to(site).as_posix(): _Page(path) for path in site.rglob("*.html")}
    foreign = {name: [url for url in page.loaded if "//" in url] for name, page in pages.items()}
    assert len(pages) > 30 and {name: urls for name, urls in foreign.items() if urls} == {}
    styles = [path.read_text(encoding="utf-8") for path in site.rglob("*.css")]
    assert [url for text in styles for url in re.findall(r"url\(\s*['\"]?(https?:[^)]+)", text)] == []


def test_the_reference_has_every_public_name(site: Path) -> None:
    """Each name of `planner` has its place in the reference of Python."""
    identifiers = _Page(site / "reference/python.html").identifiers
    names = {identifier.rpartition(".")[2] for identifier in identifiers if identifier.startswith("planner.")}
    assert set(planner.__all__) - names == set()


def test_the_reference_has_every_command(site: Path) -> None:
    """Each command has its section in the reference of the command line."""
    identifiers = _Page(site / "reference/commands.html").identifiers
    assert {f"planner-{name}" for name in COMMANDS} - identifiers == set()


def test_links_between_pages_lead_somewhere(site: Path) -> None:
    """A link from a page that was brought along, or from the README, leads to a file of the site."""
    broken = []
    for path in [site / "overview.html", *(site / "repository").rglob("*.html")]:
        for link in _Page(path).links:
            file = link.partition("#")[0]
            if file and "//" not in file and not (path.parent / file).exists():
                broken.append((path.name, link))
    assert broken == []


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as opened:
        yield opened


READ = ("index", "ledger", "hooks", "notebook", "tutorials/script", "reference/commands")


@pytest.mark.slow
@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize(("width", "scheme"), [(390, "light"), (1280, "dark")])
def test_axe_core_finds_nothing(site: Path, browser: Any, name: str, width: int, scheme: str) -> None:
    """Pages do not scroll sideways, and are readable by keyboard and screen reader as far as it tells."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.goto((site / f"{name}.html").as_uri())
    page.wait_for_selector(".md-code__nav[aria-label], article:not(:has(pre))", state="attached")
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert axe_violations(page) == []
    page.close()
