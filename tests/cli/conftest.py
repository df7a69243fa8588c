"""A file of models that command lines name."""

from pathlib import Path

import pytest

from tests.helpers.command_line import MODELS


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file models.py in the working directory."""
    (tmp_path / "models.py").write_text(MODELS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
