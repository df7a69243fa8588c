"""Asking a probe: each request runs in a process of its own, so that no run leaves anything to the next."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from calibration.observation_json import observation_from_json, read_flat, read_versions
from calibration.probe.request import Gpu, ProbeRequest
from planner import errors
from planner.errors import ModelError, PlannerError
from planner.hardware.calibration import Observation, Settings
from planner.jobs import job_to_json
from planner.planning.process import Reading

Measure = Callable[[ProbeRequest, float], Observation]  # the request, and the seconds that it may take


def find_gpu() -> Gpu:
    """The GPU that probes would run on. Raises NoGpuError where there is none."""
    said = _ask({"ask": "gpu"}, timeout_seconds=120)
    try:
        return Gpu(said["name"], read_versions(said["versions"]), read_flat(Settings, said["settings"]))
    except (LookupError, ValueError) as error:
        raise ModelError(f"the probe's answer makes no sense: {error}; report it") from error


def measure(request: ProbeRequest, timeout_seconds: float = 600) -> Observation:
    """Run the request in a fresh process.

    Raises NoGpuError, the errors of building the model, and ModelError where the steps fail for another
    reason than memory or take longer than the time.
    """
    said = {
        "ask": "steps",
        "job": job_to_json(request.job),
        "batch": request.batch,
        "allocator_cap_bytes": request.allocator_cap_bytes,
        "alloc_conf": request.alloc_conf,
        "history": None if request.history is None else str(request.history.absolute()),
        "device": request.device,
    }
    try:
        return observation_from_json(_ask(said, timeout_seconds))
    except ValueError as error:
        raise ModelError(f"the probe's answer makes no sense: {error}; report it") from error


def measure_tensors(process: Path, timeout_seconds: float = 600) -> tuple[Reading, ...]:
    """What TensorFlow measures for a process file of plain tensors, in a fresh process.

    So the variable of the seed's notebook is measured again (processes/variable.yaml). Raises the errors
    of the file, ModelError without TensorFlow, NoGpuError without a GPU.
    """
    said = _ask({"ask": "tensors", "process": str(process.absolute())}, timeout_seconds)
    try:
        return tuple(Reading(**reading) for reading in said["readings"])
    except (LookupError, TypeError) as error:
        raise ModelError(f"the probe's answer makes no sense: {error}; report it") from error


def _ask(said: dict[str, Any], timeout_seconds: float) -> dict[str, Any]:
    # -P: a folder of the user's that is called like this package must not be run in its place.
    command = [sys.executable, "-P", "-m", "calibration.probe"]
    try:
        done = subprocess.run(
            command, input=json.dumps(said), capture_output=True, text=True, timeout=timeout_seconds
        )
    except subprocess.TimeoutExpired as error:
        raise ModelError(
            f"a probe gave no answer in {timeout_seconds:.0f} s; allow more, or less batch"
        ) from error
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["nothing"])[-1][:200]
        raise ModelError(f"a probe died with code {done.returncode}, its last words: {last}") from None
    if "error" not in answer:
        return dict(answer)
    kind = getattr(errors, answer["error"], None)
    if isinstance(kind, type) and issubclass(kind, PlannerError):
        raise kind(answer["message"])
    raise ModelError(answer["message"])
