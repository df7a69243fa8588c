"""Traces of a model that runs in a process of its own, so that nothing it does reaches this one.

The child (`isolate_child`) gets the job as JSON on its standard input and leaves each trace as a file, which
is read as strictly as any other: no object crosses the line, and no pickle. What the model prints goes to
standard error. A model that ends its process, or takes longer than the limit, is an error like any other.
"""

import sys
from collections.abc import Callable, Mapping
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
    take_trace,
    trace_workload,
)
from planner.program import Target, Trace
from planner.store import load_trace

DEFAULT_LIMIT_SECONDS = 600.0
LONGEST_LIMIT_SECONDS = 10**6
_KINDS: dict[str, type[PlannerError]] = {
    kind.__name__: kind for kind in (UsageError, ModelError, BatchTooLargeError, DataFileError)
}

Opener = Callable[[Job, int | None, Factory | None, Target, Take], Workload]  # as `trace_workload`


def limit_of(options: Mapping[str, object]) -> float | None:
    """The seconds that a trace in a process of its own may take, None where `--isolate` is not given.

    Raises UsageError.
    """
    limit_seconds = options.get("time_limit")
    if not options.get("isolate"):
        if limit_seconds is not None:
            raise UsageError("--time-limit: only a model in a process of its own is stopped; add --isolate")
        return None
    if limit_seconds is None:
        return DEFAULT_LIMIT_SECONDS
    if not isinstance(limit_seconds, int | float) or not 0 < limit_seconds <= LONGEST_LIMIT_SECONDS:
        raise UsageError(f"--time-limit {limit_seconds}: give the seconds that one trace may take")
    return float(limit_seconds)


def refuse_isolation(options: Mapping[str, object], command: str) -> None:
    """Raise UsageError where the options ask for what this command does not do."""
    if limit_of(options) is not None:
        raise UsageError(f"--isolate: {command} runs the model in its own process; leave it away")


def opener_of(options: Mapping[str, object]) -> Opener:
    """How traces are taken under the options `isolate` and `time_limit`. Raises UsageError."""
    limit_seconds = limit_of(options)
    if limit_seconds is None:
        return trace_workload

    def open_apart(
        job: Job, batch: int | None, factory: Factory | None, chip: Target, take: Take = take_trace
    ) -> Workload:
        kind = "details" if take is take_detailed_trace else "plain"

        def start(tell: OnProgress) -> TraceSource:
            tell("starting a process for the model")
            apart = apart_of(job, factory, limit_seconds, kind)
            return cache(lambda size: apart.trace(size, chip))

        return Workload(job, batch, chip, start)

    return open_apart


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
