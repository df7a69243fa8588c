"""Put the programs of the catalogue's jobs into the distributions: an installed wheel answers at once."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_REQUEST = "PLANNER_CAPTURE_CATALOGUE"  # set by `make dist`: takes a minute, and the libraries of all models
_INSIDE = "planner/store/bundled"


class BuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Captures the programs on request; a wheel that is built without carries none."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the programs to the files of a distribution, unless it is built from one that has them."""
        root = Path(self.root)
        if not os.environ.get(_REQUEST) or version == "editable" or (root / _INSIDE).is_dir():
            return
        folder = root / "build" / "bundled"
        command = [sys.executable, "-m", "tools.bundle_programs", str(folder)]
        subprocess.run(command, cwd=root, check=True, stdout=sys.stderr)
        build_data["force_include"] |= {str(path): f"{_INSIDE}/{path.name}" for path in folder.iterdir()}
