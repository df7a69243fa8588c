"""Start `probe_server.py`, and let it run jobs."""

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from json import dumps
from pathlib import Path
from typing import Any

from planner.jobs import Job
from planner.jobs.codec import job_to_json

ROOT = Path(__file__).parents[2]


def job_json(job: Job) -> dict[str, Any]:
    """Return the job without the versions that it is planned for; the side that runs it has its own."""
    values = job_to_json(job.replace(cudnn=""))
    del values["torch"]
    return values


def start_server(command: Sequence[str], log: Path) -> "subprocess.Popen[str]":
    """Start the server by a Python, or by a command that runs one, and let `log` have what it prints."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # One thread, since a pool of threads does not survive a fork. Libraries that look for a GPU when they are
    # imported ask NVML, and leave CUDA alone.
    variables = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    with log.open("a") as file:
        return subprocess.Popen(
            [*command, "-P", str(Path(__file__).with_name("probe_server.py"))],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=file,
            text=True,
            env=os.environ | variables,
        )


def end_server(server: "subprocess.Popen[str]") -> None:
    """End a server after its last job."""
    assert server.stdin is not None
    server.stdin.close()
    server.wait()


def run_job(
    server: "subprocess.Popen[str]",
    job: Job,
    batch: int,
    answer: Path,
    history: Path,
    max_seconds: float,
    environment: Mapping[str, str],
) -> bool:
    """Run a job, which leaves its answer and its history; return False if the server ended before it did.

    `environment` holds variables of the job's process.
    """
    probe = {
        "ask": "steps",
        "job": job_json(job),
        "batch": batch,
        "allocator_cap_bytes": None,
        "alloc_conf": "",
        "history": str(history.absolute()),
        "device": "cuda",
    }
    request = {
        "probe": probe,
        "answer": str(answer.absolute()),
        "environment": environment,
        "max_seconds": max_seconds,
    }
    assert server.stdin is not None
    server.stdin.write(dumps(request) + "\n")
    server.stdin.flush()
    while not answer.exists():
        if server.poll() is not None:
            return False
        time.sleep(0.02)
    return True
