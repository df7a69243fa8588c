"""Put the programs of the catalogue's jobs into the distributions: an installed wheel answers at once."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_INSIDE = "planner/store/bundled"


class BuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Captures the programs where torch is installed; a wheel that is built without it carries none."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the programs to the files of a distribution."""
        root = Path(self.root)
        if version == "editable" or (root / _INSIDE).is_dir():  # the latter in a source distribution
            return
        if find_spec("torch") is None:
            self.app.display_warning(
                "no torch: the wheel carries no programs; `make dist` builds one with them"
            )
            return
        folder = root / "build" / "bundled"
        command = [sys.executable, "-m", "tools.bundle_programs", str(folder)]
        subprocess.run(command, cwd=root, check=True, stdout=sys.stderr)
        build_data["force_include"] |= {str(path): f"{_INSIDE}/{path.name}" for path in folder.iterdir()}
