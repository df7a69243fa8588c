"""The tasks of a sweep's workers and the results of the tasks, as plain data."""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from planner._support.bounded_read import LARGEST_CODE_BYTES, read_bytes
from planner.hardware import Device
from planner.jobs import Job, job_to_json


class Task(msgspec.Struct, frozen=True):
    """One model in one recipe, with the GPUs to plan for."""

    model: str  # as the tables name it
    recipe: str
    job: Job
    devices: tuple[Device, ...]
    options: Mapping[str, Any]  # the other options of `planner.gpus`


class GpuFigures(msgspec.Struct, frozen=True):
    """The largest batch sizes of a task on one GPU, with the process memory of the largest."""

    gpu: str
    total_mib: int | float
    max_batch: int  # 0 if not even 1 fits
    process_mib: int | float | None  # at `max_batch`, as nvidia-smi shows it; None if no batch size fits
    process_upper_mib: int | float | None  # upper bound of `process_mib` at the confidence
    headroom_mib: int | float | None
    calibrated: bool
    source: str
    comfortable_batch: int  # the largest without retries; 0 if no batch size fits without retries


class TaskResult(msgspec.Struct, frozen=True):
    """The figures of a task for each GPU, or the reason why there are none."""

    cells: Mapping[str, GpuFigures] = {}  # by `device_digest`
    notes: tuple[str, ...] = ()
    unknown_ops: tuple[str, ...] = ()
    seconds: float = 0.0
    failure: str = ""  # one line with the reason why there are no cells; empty if the task was planned


def device_digest(device: Device) -> str:
    """Return a digest of all known properties of a GPU."""
    return sha256(repr(device).encode()).hexdigest()[:16]


def task_to_json(task: Task) -> dict[str, Any]:
    """Return the job and the options that affect a task's figures as JSON data.

    The GPUs are left out. A digest of the file of sample sizes is included, if the job has such a file.
    """
    deciding = ("alloc_conf", "confidence", "no_calibration")
    options = {name: value for name, value in task.options.items() if name in deciding}
    cap = task.options.get("allocator_cap_mib")
    sizes = {"sizes": _file_digest(task.job.samples.sizes)} if task.job.samples.sizes else {}
    return {"job": job_to_json(task.job), **options, "allocator_cap_mib": cap, **sizes}


def _file_digest(path: str) -> str:
    """Return a digest of a file's contents, or "" if the file cannot be read."""
    try:
        return sha256(read_bytes(Path(path), LARGEST_CODE_BYTES)).hexdigest()[:16]
    except OSError:
        return ""
