"""Traces of a model that runs in a process of its own, so that nothing it does reaches this one.

The child (`isolate_child`) gets the job as JSON on its standard input and leaves each trace as a file, which
is read as strictly as any other: no object crosses the line, and no pickle. What the model prints goes to
standard error. A model that ends its process, or takes longer than the limit, is an error like any other.
"""

import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from planner._support.worker import Worker, WorkerError
from planner.errors import BatchTooLargeError, DataFileError, ModelError, PlannerError, UsageError
from planner.jobs import Job, job_to_json
from planner.planning import (
    Factory,
    OnProgress,
    Take,
    TraceSource,
    Workload,
    take_detailed_trace,
)
from planner.program import Target, Trace
from planner.store import load_trace

_KINDS: dict[str, type[PlannerError]] = {
    kind.__name__: kind for kind in (UsageError, ModelError, BatchTooLargeError, DataFileError)
}


def isolated_workload(
    job: Job, batch: int | None, factory: Factory | None, target: Target, take: Take, limit_seconds: float
) -> Workload:
    """Return the source of traces that a process of its own takes, each within `limit_seconds`.

    Raises UsageError for a model that is an object of this process.
    """
    kind = "details" if take is take_detailed_trace else "plain"

    def start(on_progress: OnProgress) -> TraceSource:
        on_progress("starting a process for the model")
        apart = apart_of(job, factory, limit_seconds, kind)
        return cache(lambda size: apart.trace(size, target))

    return Workload(job, batch, target, start)


def apart_of(job: Job, factory: Factory | None, limit_seconds: float, kind: str = "plain") -> "Apart":
    """The job's own process. Raises UsageError for a model that is an object of this one."""
    if factory is not None:
        raise UsageError("--isolate: another process cannot see this object; name it as FILE.py:NAME")
    return Apart(job, limit_seconds, kind)


class Apart:
    """A job in a process of its own, from its first trace until nobody can ask it any more."""

    def __init__(self, job: Job, limit_seconds: float, kind: str = "plain") -> None:
        self._model, self._limit_seconds = job.model, limit_seconds
        self._folder = TemporaryDirectory(prefix="planner-")
        # -P: a folder of the user's that is called like this package must not be run in its place.
        self._worker = Worker([sys.executable, "-P", "-m", "planner.capture.subprocess.worker"])
        self._job = {"job": job_to_json(job), "kind": kind, "limit_seconds": limit_seconds}

    def trace(self, batch: int, chip: Target) -> Trace:
        """The trace of a batch size. Raises what the child raised, ModelError where it gave no answer."""
        path = Path(self._folder.name) / f"{batch}.trace"
        asked = {"batch": batch, "capability": chip.capability, "multiprocessors": chip.sm_count}
        try:
            answer = self._worker.request({**self._job, **asked, "path": str(path)}, self._limit_seconds)
        except WorkerError as error:
            raise ModelError(f"{self._model}: no trace of batch {batch}{self._cause(error)}") from None
        except BaseException:
            self._worker.close()
            raise
        if "error" in answer:
            kind = _KINDS.get(str(answer["error"]), ModelError)
            raise kind(str(answer.get("message"))[:1000])
        if not path.is_file():  # a pipe would never end
            raise ModelError(f"{self._model}: its process left no trace of batch {batch}")
        trace, _ = load_trace(path)
        path.unlink()
        return trace

    def _cause(self, error: WorkerError) -> str:
        if error.returncode is None:
            return f" in {self._limit_seconds:g} s; mend what hangs, or allow more with --time-limit"
        return f": its process {error}; mend what ends it"
