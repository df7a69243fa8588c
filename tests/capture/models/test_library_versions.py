"""Versions of libraries whose private parts captures rely on."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from planner.capture.models.library_versions import HELD_VERSIONS, notes_on_versions

ROOT = Path(__file__).parents[3]
PINS = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M))


@pytest.mark.parametrize("library", sorted(HELD_VERSIONS.keys() & PINS.keys()))
def test_the_pinned_version_is_the_held_one(library: str) -> None:
    """A pin of another version waits until what relies on the library was held against it."""
    held, where = HELD_VERSIONS[library]
    assert PINS[library].startswith(f"{held}."), f"{library} {PINS[library]}: hold {where} against it"
    assert (ROOT / where).exists()


def test_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer says that a library's version is not the one that plans are held to."""
    for name in HELD_VERSIONS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert list(notes_on_versions()) == []
    for name, version in (("peft", "0.21.9"), ("transformers", "4.57.1+local")):
        library = ModuleType(name)
        library.__version__ = version  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, library)
    assert list(notes_on_versions()) == [
        "transformers 4.57.1 is installed, plans are held to 5.23: it may allocate otherwise"
    ]
