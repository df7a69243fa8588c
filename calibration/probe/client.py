"""Send requests to the probe.

Each runs in a fresh process, so that no request affects the next.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TypeVar

from msgspec import Struct, to_builtins
from msgspec.structs import asdict

from calibration.observations import observation_from_json
from planner._support.conversion import convert
from planner._support.worker import Worker, WorkerError
from planner.errors import ModelError
from planner.hardware.calibration import Observation, Settings, Versions
from planner.jobs import Job, job_to_json

T = TypeVar("T")


class DetectedGpu(Struct, frozen=True):
    """This machine's GPU by name, with software versions, memory sizes and TF32 settings.

    They are read in a fresh process.
    """

    name: str  # as torch names it
    versions: Versions
    settings: Settings  # the defaults of a process


class ProbeRequest(Struct, frozen=True):
    """A request to measure one job at one batch size in a fresh process."""

    job: Job
    batch: int
    allocator_cap_bytes: int | None = None  # a bound on the caching allocator alone
    alloc_conf: str = ""  # the text of PYTORCH_ALLOC_CONF
    history: Path | None = None  # the file to write the allocator's history to; None to record no history
    device: str = "cuda"  # tests use "cpu": the same loop, no figures


Measure = Callable[[ProbeRequest, float], Observation]  # the request, and the seconds that it may take


def find_gpu() -> DetectedGpu:
    """Return the GPU that probes would run on. Raises NoGpuError if there is none."""
    return _request({"ask": "gpu"}, lambda answer: convert(answer, DetectedGpu), timeout_seconds=120)


def measure(request: ProbeRequest, timeout_seconds: float = 600) -> Observation:
    """Run the steps of a request in a fresh process, and return the observed memory.

    Raises NoGpuError, the errors of building the model, and ModelError if the steps fail for another reason
    than memory or take longer than the timeout.
    """
    history = None if request.history is None else str(request.history.absolute())
    fields = asdict(request) | {"job": job_to_json(request.job), "history": history}
    return _request({"ask": "steps"} | to_builtins(fields), observation_from_json, timeout_seconds)


def _request(message: dict[str, Any], read: Callable[[Any], T], timeout_seconds: float) -> T:
    with TemporaryFile() as output:
        # -P: a user's folder with the name of this package must not be run in its place.
        worker = Worker([sys.executable, "-P", "-m", "calibration.probe"], output)
        try:
            return read(worker.request(message, timeout_seconds))
        except WorkerError as error:
            if error.returncode is None:
                problem = f"a probe gave no answer in {timeout_seconds:.0f} s; allow more, or less batch"
                raise ModelError(problem) from error
            output.seek(0)
            last = (output.read().decode(errors="replace").strip().splitlines() or ["nothing"])[-1][:200]
            raise ModelError(f"a probe died with code {error.returncode}, its last words: {last}") from None
        except (LookupError, ValueError) as error:
            raise ModelError(f"the probe's answer is malformed: {error}; report it") from error
        finally:
            worker.close()
