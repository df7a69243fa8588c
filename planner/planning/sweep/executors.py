"""Tasks of a sweep in parallel processes: joblib's own on this machine, or an existing Dask cluster.

A task that ends its process takes no other with it: those that were under way are run again one by one, which
shows which of them it was.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from planner.errors import ModelError, UsageError
from planner.planning.sweep.task import Done, Task, run_task

Found = tuple[int, Done]  # the place of the task, and what came of it
CONNECT_SECONDS = 30


class Engine(Protocol):
    """Where tasks run."""

    width: int  # tasks at a time
    lost: Any  # the exceptions that are raised where a worker died

    def run(self, tasks: Sequence[tuple[int, Task]], width: int) -> Iterator[Found]:
        """Run tasks, at most `width` at a time; each is told as soon as it is done."""

    def close(self) -> None:
        """Let go of what it takes to run tasks."""


def run_all(tasks: Sequence[Task], engine: Engine) -> Iterator[Found]:
    """What came of each task, in the order in which they end."""
    left = list(enumerate(tasks))
    while left:
        done: set[int] = set()
        try:
            for place, found in engine.run(left, engine.width):
                done.add(place)
                yield place, found
        except engine.lost:
            left = [one for one in left if one[0] not in done]
            # They are handed out in order, each when another ends: it was one of the first.
            yield from _one_by_one(left[: engine.width], engine)
            left = left[engine.width :]
        else:
            left = [one for one in left if one[0] not in done]


def _one_by_one(suspects: Sequence[tuple[int, Task]], engine: Engine) -> Iterator[Found]:
    for place, task in suspects:
        try:
            yield from engine.run([(place, task)], 1)
        except engine.lost:
            yield place, Done({}, failure=f"{task.job.model}: its process died; see why with --isolate")


class LocalEngine:
    """Processes on this machine."""

    def __init__(self, jobs: int) -> None:
        self.width = jobs
        loky = _import("joblib.externals.loky", "sweep")
        self.lost: tuple[type[BaseException], ...] = (loky.process_executor.BrokenProcessPool,)
        self._joblib = _import("joblib", "sweep")

    def run(self, tasks: Sequence[tuple[int, Task]], width: int) -> Iterator[Found]:
        """As Engine says."""
        # One process alone would be this one, which a model may end: two are made, and one is used.
        yield from _parallel(self._joblib, tasks, max(2, width), width, _told_here)

    def close(self) -> None:
        """Idle processes end by themselves."""


class DaskEngine:
    """The workers of a Dask cluster, whatever runs beside on it."""

    def __init__(self, scheduler: str) -> None:
        distributed = _import("distributed", "dask")
        self._joblib = _import("joblib", "dask")
        client = None
        try:
            client = distributed.Client(scheduler, timeout=CONNECT_SECONDS, set_as_default=False)
            client.wait_for_workers(1, timeout=CONNECT_SECONDS)
        except (OSError, TimeoutError, ValueError) as error:
            if client is not None:
                client.close()
            problem = " ".join(str(error).split())[:200]
            raise UsageError(
                f"--scheduler {scheduler}: no worker of a Dask cluster answers: {problem}"
            ) from error
        self._client = client
        self.width = max(1, sum(client.ncores().values()))
        self.lost: tuple[type[BaseException], ...] = (distributed.scheduler.KilledWorker,)

    def run(self, tasks: Sequence[tuple[int, Task]], width: int) -> Iterator[Found]:
        """As Engine says."""
        with self._joblib.parallel_config(backend="dask", client=self._client):
            yield from _parallel(self._joblib, tasks, -1, width, _told)

    def close(self) -> None:
        """Else a thread would look for the cluster, once it is gone, for as long as this process lives."""
        self._client.close()


def _parallel(
    joblib: Any, tasks: Sequence[tuple[int, Task]], jobs: int, width: int, run: Callable[[int, Task], Found]
) -> Iterator[Found]:
    """Handed out one by one, so that no task waits behind a long one."""
    chosen = {"n_jobs": jobs} if jobs > 0 else {}
    pool = joblib.Parallel(
        **chosen, batch_size=1, pre_dispatch=width, return_as="generator_unordered", max_nbytes=None
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # loky's advice about memory that a worker took
        yield from pool(joblib.delayed(run)(place, task) for place, task in tasks)


def _told(place: int, task: Task) -> Found:
    return place, run_task(task)


def _told_here(place: int, task: Task) -> Found:
    # A worker inherits standard output, where the answer will stand and nothing that a model prints.
    os.dup2(2, 1)
    return _told(place, task)


def _import(module: str, extra: str) -> Any:
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError as error:
        what = module.partition(".")[0]
        raise ModelError(f"{what} is not installed; pip install 'gpu-batch-planner[{extra}]'") from error
