"""Client of the probe: each request runs in a process of its own, which leaves nothing to the next."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct, to_builtins
from msgspec.structs import asdict

from calibration.observations import observation_from_json
from planner import errors
from planner._support.conversion import convert
from planner.errors import ModelError, PlannerError
from planner.hardware.calibration import Observation, Settings, Versions
from planner.jobs import Job, job_to_json
from planner.planning.process import Reading

T = TypeVar("T")


class DetectedGpu(Struct, frozen=True):
    """The GPU of this machine, as a fresh process finds it."""

    name: str  # as torch names it
    versions: Versions
    settings: Settings  # those of a process that changes none


class ProbeRequest(Struct, frozen=True):
    """One job at one batch size in a fresh process."""

    job: Job
    batch: int
    allocator_cap_bytes: int | None = None  # a bound on the caching allocator alone
    alloc_conf: str = ""  # the text of PYTORCH_ALLOC_CONF
    history: Path | None = None  # where the allocator's history is written; None: it is not recorded
    device: str = "cuda"  # tests say "cpu": the same loop, no figures


Measure = Callable[[ProbeRequest, float], Observation]  # the request, and the seconds that it may take


def find_gpu() -> DetectedGpu:
    """Return the GPU that probes would run on. Raises NoGpuError where there is none."""
    return _ask({"ask": "gpu"}, lambda answer: convert(answer, DetectedGpu), timeout_seconds=120)


def measure(request: ProbeRequest, timeout_seconds: float = 600) -> Observation:
    """Run the request in a fresh process.

    Raises NoGpuError, the errors of building the model, and ModelError where the steps fail for another
    reason than memory or take longer than the time.
    """
    history = None if request.history is None else str(request.history.absolute())
    fields = asdict(request) | {"job": job_to_json(request.job), "history": history}
    return _ask({"ask": "steps"} | to_builtins(fields), observation_from_json, timeout_seconds)


def measure_tensors(process: Path, timeout_seconds: float = 600) -> tuple[Reading, ...]:
    """Return TensorFlow's measurements of a process file of plain tensors, in a fresh process.

    So the variable of the seed's notebook is measured again (processes/variable.yaml). Raises the errors
    of the file, ModelError without TensorFlow, NoGpuError without a GPU.
    """
    document = {"ask": "tensors", "process": str(process.absolute())}
    return _ask(document, lambda answer: convert(answer["readings"], tuple[Reading, ...]), timeout_seconds)


def _ask(document: dict[str, Any], read: Callable[[Any], T], timeout_seconds: float) -> T:
    # -P: a folder of the user's that is called like this package must not be run in its place.
    command = [sys.executable, "-P", "-m", "calibration.probe"]
    try:
        done = subprocess.run(
            command, input=json.dumps(document), capture_output=True, text=True, timeout=timeout_seconds
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
    if "error" in answer:
        kind = getattr(errors, answer["error"], None)
        if isinstance(kind, type) and issubclass(kind, PlannerError):
            raise kind(answer["message"])
        raise ModelError(answer["message"])
    try:
        return read(answer)
    except (LookupError, ValueError) as error:
        raise ModelError(f"the probe's answer is malformed: {error}; report it") from error
