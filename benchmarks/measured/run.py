"""Measure the jobs of `jobs.py` on this machine's GPU, several at a time, and keep the allocator's histories.

    python -m benchmarks.measured.run [--workers 10] [--seconds 300] [--memory-gib 70] --to FOLDER

Each job is a process of its own, forked by `benchmarks.emulated.probe_server`, with the loop of
`calibration.probe`. What torch's allocator does in one process does not depend on the others as long as the
GPU's memory suffices for all, so jobs run side by side within --memory-gib by their predictions. Each leaves
an observation, NUMBER.json, and the allocator's history, NUMBER.history.gz. Jobs begin by rising number; what
has not begun after --seconds is left out, and what has an observation is not run again.
"""

import argparse
import json
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import gettempdir

from benchmarks.emulated.probe_client import end_server, run_job, start_server
from benchmarks.measured.jobs import PLANNED, Planned, job_of
from benchmarks.rows import read_rows

CONTEXT_BYTES = 1 << 30  # of a process beside what it reserves, with room for a prediction that is too low
MAX_SECONDS = 150  # of a job


@dataclass(slots=True)
class Queue:
    """Jobs that wait, and the memory that the running ones may take."""

    jobs: list[Planned]
    free_bytes: int
    until: float
    changed: threading.Condition = field(default_factory=threading.Condition)

    def take(self) -> Planned | None:
        """Return the next job once there is memory for it; None if no more jobs are to begin."""
        with self.changed:
            while self.jobs and time.monotonic() < self.until:
                for job in self.jobs:
                    if need_of(job) <= self.free_bytes:
                        self.jobs.remove(job)
                        self.free_bytes -= need_of(job)
                        return job
                self.changed.wait(1.0)
            return None

    def give_back(self, job: Planned) -> None:
        """Count a job's memory as free again."""
        with self.changed:
            self.free_bytes += need_of(job)
            self.changed.notify_all()


def need_of(job: Planned) -> int:
    """Return the bytes of the GPU's memory that are set aside for a job."""
    return int(job.reserved * 1.1) + CONTEXT_BYTES


def serve(queue: Queue, folder: Path, number: int) -> None:
    """Run jobs by one server of probes until no more are to begin."""
    server = start_server([sys.executable], folder / f"server{number}.log")
    while server.poll() is None and (job := queue.take()) is not None:
        answer = folder / f"{job.number}.json"
        start = time.monotonic()
        variables = {"TORCHINDUCTOR_CACHE_DIR": str(Path(gettempdir()) / "inductor" / str(job.number))}
        history = answer.with_suffix(".history.gz")
        run_job(server, job_of(job), job.batch, answer, history, MAX_SECONDS, variables)
        queue.give_back(job)
        seconds = time.monotonic() - start
        print(job.number, job.model, job.batch, f"{seconds:.1f} s", _said(answer), flush=True)
    end_server(server)


def _said(answer: Path) -> str:
    """Return the reserved peak of an observation, or its error, in words."""
    if not answer.exists():
        return "no answer"
    values = json.loads(answer.read_bytes())
    if "error" in values:
        return f"{values['error']}: {values['message'][:200]}"
    return f"{values['peak_reserved_bytes']:,}{' out of memory' if values['oom'] else ''}"


def main() -> None:
    """Run the jobs."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--workers", type=int, default=10, metavar="N", help="processes at a time")
    parser.add_argument("--seconds", type=float, default=300, help="after which no job begins")
    parser.add_argument("--memory-gib", type=float, default=70, help="for all jobs that run")
    parser.add_argument("--jobs", type=Path, default=PLANNED, metavar="FILE", help="what jobs.py wrote")
    parser.add_argument("--to", type=Path, required=True, metavar="FOLDER")
    options = parser.parse_args()
    options.to.mkdir(parents=True, exist_ok=True)
    jobs = [job for job in read_rows(options.jobs, Planned) if not job.failure]
    jobs = [job for job in jobs if not (options.to / f"{job.number}.json").exists()]
    queue = Queue(jobs, int(options.memory_gib * (1 << 30)), time.monotonic() + options.seconds)
    workers = [
        threading.Thread(target=serve, args=(queue, options.to, number)) for number in range(options.workers)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


if __name__ == "__main__":
    sys.exit(main())
