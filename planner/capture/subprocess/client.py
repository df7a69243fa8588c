"""Capture a model in a child process, so that the model's code cannot affect this process.

The child (`worker`) gets the job as JSON on its standard input and writes programs to files, which are
checked as strictly as any other file: no Python object or pickle is passed between the processes. Output that
the model prints goes to standard error. A model that ends its process, or exceeds the time limit, is reported
as an error.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from planner._support.worker import Worker, WorkerError
from planner.errors import ModelError
from planner.jobs import Job, job_to_json
from planner.program import FIT_BATCHES, Program, Target
from planner.store import load_programs


class TracerProcess:
    """A builder that captures a job's programs in a child process.

    Implements `planner.program.ProgramBuilder`. The process runs from the first capture until this object is
    garbage collected.
    """

    def __init__(self, job: Job, limit_seconds: float, *, provenance: bool = False) -> None:
        self._model, self._limit_seconds = job.model.name, limit_seconds
        self._folder = TemporaryDirectory(prefix="planner-")
        # -P: a folder of the user with the name of this package must not be run in its place.
        command = [sys.executable, "-P", "-m", "planner.capture.subprocess.worker"]
        self._worker = Worker(command, mark=f"PLANNER_ISOLATED={self._folder.name}")
        self._run_kind = "provenance" if provenance else "run"
        self._job = {"job": job_to_json(job), "limit_seconds": limit_seconds}

    def programs(self, target: Target) -> tuple[Program, ...]:
        """Return the job's programs for the target, or () if no program fits or with `provenance`."""
        return () if self._run_kind == "provenance" else self._request("programs", FIT_BATCHES[0], target)

    def run(self, batch: int, target: Target) -> Program:
        """Return the program of one run at a batch size.

        Raises the error that the child raised, or ModelError if the child failed or left no file.
        """
        return self._request(self._run_kind, batch, target)[0]

    def enumerate_variants(self, program: Program, target: Target) -> None:
        """Do nothing, since the child has enumerated the variants already."""

    def _request(self, kind: str, batch: int, target: Target) -> tuple[Program, ...]:
        path = Path(self._folder.name) / f"{batch}.trace"
        gpu = {"capability": target.capability, "multiprocessors": target.sm_count}
        message = {**self._job, **gpu, "kind": kind, "batch": batch, "path": str(path)}
        try:
            self._worker.request(message, self._limit_seconds)
        except WorkerError as error:
            raise ModelError(f"{self._model}: no trace of batch {batch}{self._cause(error)}") from None
        except KeyboardInterrupt:
            self._worker.close()
            raise
        if not path.is_file():  # also refuses a pipe, which could be read without end
            raise ModelError(f"{self._model}: its process left no trace of batch {batch}")
        file = load_programs(path)
        path.unlink()
        return tuple(one.program for one in file.programs if one.load_target(target.capability))

    def _cause(self, error: WorkerError) -> str:
        if error.returncode is None:
            return f" in {self._limit_seconds:g} s; mend what hangs, or allow more with --time-limit"
        return f": its process {error}; mend what ends it"
