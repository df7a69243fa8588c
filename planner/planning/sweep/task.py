"""One job of a sweep, as a worker runs it: plain data in, plain data out, and no exception gets away."""

import sys
import threading
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from hashlib import sha256
from time import perf_counter
from typing import Any, cast

from planner.api.gpus import gpus
from planner.api.options import Options
from planner.errors import PlannerError
from planner.hardware import Device
from planner.jobs import Job, job_to_json

# A worker of a Dask cluster may have several threads; traces run one at a time in a process.
_ALONE = threading.Lock()


@dataclass(frozen=True, slots=True)
class Task:
    """One model in one recipe, on all GPUs that are still missing."""

    model: str  # as the tables name it
    recipe: str
    job: Job
    devices: tuple[Device, ...]
    options: Mapping[str, Any]  # the rest of what `planner.gpus` takes


@dataclass(frozen=True, slots=True)
class Done:
    """What came of a task."""

    cells: Mapping[str, dict[str, Any]]  # by `device_digest`: the row of `planner gpus`
    notes: tuple[str, ...] = ()
    unknown_ops: tuple[str, ...] = ()
    seconds: float = 0.0
    failure: str = ""  # one line; there are no cells then


def run_task(task: Task) -> Done:
    """Run a task in this process; a failure of any kind is told in the result."""
    start = perf_counter()
    try:
        with _ALONE, redirect_stdout(sys.stderr):
            found = gpus(task.job, devices=task.devices, **cast(Options, task.options))
            said = found.to_dict()
    except PlannerError as error:
        return _failed(str(error), start)
    except BaseException as error:  # a model's, or ours: the other jobs go on
        return _failed(f"internal error: {type(error).__name__}: {str(error)[:300]}", start)
    rows = {row["gpu"]: row for row in said["rows"]}
    return Done(
        {device_digest(device): rows[device.name] for device in task.devices},
        tuple(said["assumptions"]),
        tuple(said["unknown_ops"]),
        perf_counter() - start,
    )


def device_digest(device: Device) -> str:
    """Return a digest that is equal for equal GPUs."""
    return sha256(repr(device).encode()).hexdigest()[:16]


def task_to_json(task: Task) -> dict[str, Any]:
    """What a task is, but for its GPUs."""
    told = {name: value for name, value in task.options.items() if name in ("alloc_conf", "confidence")}
    cap = task.options.get("allocator_cap_mib")
    return {"job": job_to_json(task.job), **told, "allocator_cap_mib": cap}


def _failed(why: str, start: float) -> Done:
    return Done({}, failure=" ".join(why.split()), seconds=perf_counter() - start)
