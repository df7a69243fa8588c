"""A Chromium for tests of pages, and what axe-core finds in a page."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from typing import Any

import pytest


@contextmanager
def chromium() -> Iterator[Any]:
    """Yield a browser of playwright; without playwright or Chromium the test is skipped."""
    sync_api = pytest.importorskip("playwright.sync_api")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("needs a Chromium: apt-get install chromium")
    with sync_api.sync_playwright() as play:
        # Without its sandbox, which the root of a container may not make.
        browser = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def axe_violations(page: Any) -> list[tuple[str, str]]:
    """Return the rule and the element of each violation that axe-core finds in a page that is open."""
    page.evaluate(resources.files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8"))
    found = page.evaluate("axe.run(document)")["violations"]
    return [(rule["id"], node["html"]) for rule in found for node in rule["nodes"]]
