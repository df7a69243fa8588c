"""Start the emulated GPU in a Python process of `planner run`.

`planner run` puts this folder on PYTHONPATH.
"""

import importlib.util
import os
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def _start_planner() -> None:
    folder = _HERE.parent
    spec = importlib.util.spec_from_file_location(
        "_planner_emulator", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["_planner_emulator"] = package
    spec.loader.exec_module(package)
    from importlib import import_module

    import_module("_planner_emulator.boot").install()


def _run_own_sitecustomize() -> None:
    """Run the environment's `sitecustomize`, which this file hides."""
    for entry in sys.path:
        path = Path(entry, "sitecustomize.py")
        if path.is_file() and path.resolve().parent != _HERE:
            spec = importlib.util.spec_from_file_location("sitecustomize", path)
            assert spec is not None and spec.loader is not None
            spec.loader.exec_module(importlib.util.module_from_spec(spec))
            return


if os.environ.get("PLANNER_EMULATED_GPU"):
    _start_planner()
_run_own_sitecustomize()
