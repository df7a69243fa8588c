"""The hooks are imported as a user's script imports them, in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest


def run_fresh(script: str, folder: Path) -> None:
    """Run a script in a new interpreter and show what it printed where it fails."""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "hook", ["planner.api.integrations.lightning", "planner.api.integrations.huggingface"]
)
def test_libraries_import_after_a_hook(hook: str, tmp_path: Path) -> None:
    """A script that imports the hook first may import the frameworks and torchvision's models afterwards."""
    script = f"import {hook}\nimport transformers, torchvision.models\nfrom transformers import Trainer\n"
    run_fresh(script + "import lightning.pytorch", tmp_path)
