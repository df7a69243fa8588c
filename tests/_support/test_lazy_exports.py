"""Lazy facades of packages."""

import sys
from pathlib import Path

import pytest


def test_names_are_imported_when_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name imports its module alone, a function stands before the module that is called like it, and an
    unknown name is an AttributeError.
    """
    package = tmp_path / "lazily"
    package.mkdir()
    attach = "from planner._support.lazy_exports import attach_stub\n"
    (package / "__init__.py").write_text(
        f"{attach}__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)\n"
    )
    (package / "__init__.pyi").write_text(
        "from .other import nothing as nothing\nfrom .run import (\n    STEPS as STEPS, run as run,\n)\n"
    )
    (package / "run.py").write_text("STEPS = 3\ndef run():\n    return STEPS\n")
    monkeypatch.syspath_prepend(tmp_path)
    import lazily
    from lazily import STEPS, run  # type: ignore[import-not-found]

    assert (STEPS, run(), lazily.run()) == (3, 3, 3)
    assert sys.modules["lazily.run"].STEPS == 3
    assert dir(lazily) == ["STEPS", "nothing", "run"]
    assert "lazily.other" not in sys.modules
    with pytest.raises(AttributeError, match="module 'lazily' has no attribute 'else_'"):
        lazily.else_  # noqa: B018


def test_a_broken_module_says_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`from package import name` does not hide an AttributeError of the name's module."""
    package = tmp_path / "broken"
    package.mkdir()
    attach = "from planner._support.lazy_exports import attach_stub\n"
    (package / "__init__.py").write_text(
        f"{attach}__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)\n"
    )
    (package / "__init__.pyi").write_text("from .run import run as run\n")
    (package / "run.py").write_text("import math\nrun = math.fused_norm\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"^broken\.run: AttributeError: module 'math' has no attribute"):
        from broken import run  # type: ignore[import-not-found]  # noqa: F401
