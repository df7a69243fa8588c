"""Run one job on an emulated GPU, and trace and replay it: two sides of the same loop."""

import json
import subprocess
import sys
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from benchmarks.emulated.probe_client import end_server, job_json, run_job, start_server
from planner.allocator.config import MemoryLimits, config_of_torch
from planner.allocator.history.file import load_history
from planner.allocator.replay import replay_trace
from planner.emulator.gpu import describe_gpu
from planner.errors import PlannerError
from planner.hardware.device import Device
from planner.jobs import Job
from planner.planning.programs import CaptureMode, open_programs
from planner.program import ignore_progress
from planner.program.events import Outcome, Trace

MAX_SECONDS = 400
LOG = "server.log"
GPU_VARIABLE = "PLANNER_EMULATED_GPU"  # a fork reads it when CUDA starts (planner/emulator/csrc/gpu.c)


@dataclass(frozen=True, slots=True)
class Side:
    """The peaks of one side, or its failure."""

    allocated_bytes: int = 0
    reserved_bytes: int = 0
    oom: bool = False
    retries: int = 0
    versions: str = ""
    failure: str = ""


@dataclass(slots=True)
class Emulator:
    """A server of probes for one GPU at a time, under `planner run`.

    `folder` caches its answers and histories, valid as long as neither the emulator nor the libraries of
    `python` change.
    """

    python: str  # has the CUDA build of torch, the libraries of the models and the planner's dependencies
    folder: Path
    max_seconds: float = MAX_SECONDS  # of a run
    _gpu: str = ""
    _server: "subprocess.Popen[str] | None" = None

    def run(self, job: Job, batch: int, gpu: str, card: Device | None = None) -> tuple[Side, Path]:
        """Run the loop of `planner.capture.loop.training_loop`, or read the answer of an earlier run.

        `card` is the GPU with another memory or context than the database's. Returns the peaks and the file
        with the allocator's history, which is missing if the run failed.
        """
        described = "" if card is None else describe_gpu(card)
        key = [job_json(job), batch, gpu]
        request = json.dumps([*key, described] if described else key)
        name = sha256(request.encode()).hexdigest()[:16]
        history, answer = self.folder / f"{name}.history.gz", self.folder / f"{name}.json"
        if not answer.exists():
            self._request(job, batch, gpu, described, history, answer)
        return side_of(json.loads(answer.read_bytes()), history), history

    def close(self) -> None:
        """End the server."""
        if self._server is not None:
            end_server(self._server)
            self._server = None

    def _request(self, job: Job, batch: int, gpu: str, described: str, history: Path, answer: Path) -> None:
        server = self._started(self._gpu or gpu if described else gpu)
        environment = {
            **({GPU_VARIABLE: described} if described else {}),
            # An empty cache of inductor: what it times depends on it.
            "TORCHINDUCTOR_CACHE_DIR": str(answer.with_suffix(".inductor").absolute()),
        }
        if not run_job(server, job, batch, answer, history, self.max_seconds, environment):
            raise SystemExit(f"{self.python}: the server of probes ended; see {self.folder / LOG}")

    def _started(self, gpu: str) -> "subprocess.Popen[str]":
        if gpu != self._gpu:
            self.close()
        if self._server is None:
            self._gpu = gpu
            self.folder.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-m", "planner", "run", "--gpu", gpu, "--", self.python]
            self._server = start_server(command, self.folder / LOG)
        return self._server


def side_of(answer: dict[str, Any], history: Path) -> Side:
    """Return the side of which a server of probes left this answer and history."""
    if "error" in answer:
        return Side(failure=f"{answer['error']}: {answer['message']}")
    if answer["oom"] and not any(event.action == "oom" for event in load_history(history).events):
        # the probe takes it for want of memory
        return Side(failure="cuDNN has no engine for a convolution")
    versions = answer["versions"]
    return Side(
        answer["peak_allocated_bytes"],
        answer["peak_reserved_bytes"],
        answer["oom"],
        answer["retries"],
        f"torch {versions['torch']}, cudnn {versions['cudnn']}",
    )


def plan_statically(job: Job, batch: int, device: Device) -> tuple[Side, Trace | None]:
    """Trace the job and replay it with exactly the emulated GPU's memory."""
    try:
        trace = open_programs(job, ignore_progress, mode=CaptureMode.WITH_PROVENANCE).trace(
            batch, device.target
        )
    except PlannerError as error:
        return Side(failure=f"{type(error).__name__}: {error}"), None
    limits = MemoryLimits(
        capacity_bytes=device.usable.value - device.context.value,
        total_bytes=device.usable.value,
        config=config_of_torch(job.environment.torch),
    )
    run = replay_trace(trace, limits)
    side = Side(
        run.peak_allocated_bytes,
        run.peak_reserved_bytes,
        run.outcome is Outcome.DOES_NOT_FIT,
        run.retries,
    )
    return side, trace


def torch_of(python: str) -> str:
    """Return the version of this Python's torch."""
    code = "from importlib.metadata import version; print(version('torch'))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def cudnn_of(python: str) -> str:
    """Return the folder of the cuDNN that this Python's torch runs with."""
    code = "import importlib.util as u; print(*u.find_spec('nvidia.cudnn').submodule_search_locations)"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return str(Path(done.stdout.strip()) / "lib")
