"""Make the plans of cuDNN's configurations, in a process of its own, beside the workspaces that they name.

    python cudnn_plans.py FOLDER CUBLASLT GPU

The arguments are those of `planner/hardware/cudnn/worker.py`; standard input has a JSON list of its queries.
The answer is a list of the two workspaces of each configuration, of the plan null where none can be made.
"""

import ctypes
import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "planner" / "hardware" / "cudnn"))
import worker  # type: ignore[import-not-found]

PLAN, OF_CONFIG, ON_DEVICE, WORKSPACE = 5, 401, 407, 402  # its descriptor and attributes


def workspaces_of(library: Any, query: dict[str, Any]) -> list[tuple[int, int | None]]:
    """Return the workspaces of all configurations of a query."""
    with ExitStack() as made:
        device, graph = library.device(query["device"]), worker._graph(library, made, query)
        configs = worker._configs(library, made, graph, device, worker._INSTANT, sys.maxsize)
        return [(worker._workspace(library, one), plan_workspace(library, one, device)) for one in configs]


def plan_workspace(library: Any, config: Any, device: Any) -> int | None:
    """Return the workspace of the plan of a configuration."""
    with ExitStack() as made:
        plan = library.create(PLAN, made)
        library.set(plan, OF_CONFIG, "descriptor", config)
        library.set(plan, ON_DEVICE, "descriptor", device)
        try:
            library.call("Finalize", plan)
        except worker.RefusedError:
            return None
        size_bytes = ctypes.c_int64()
        library.get(plan, WORKSPACE, "int64", 1, ctypes.byref(size_bytes))
        return size_bytes.value


if __name__ == "__main__":
    _, folder, cublaslt, os.environ["PLANNER_EMULATED_GPU"] = sys.argv
    opened = worker.Library(Path(folder), cublaslt)
    json.dump([pair for query in json.load(sys.stdin) for pair in workspaces_of(opened, query)], sys.stdout)
