"""Run a sweep's tasks on concurrent.futures executors: local loky processes, or a Dask cluster.

If a worker dies, no other task is lost: the tasks that were running at that time are run again one by one,
which shows which of them ends its process.
"""

import os
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib import import_module
from typing import Any
from unittest import mock

from msgspec import Struct

from planner.errors import ModelError, UsageError
from planner.planning.sweep.task import Task, TaskResult

CONNECT_SECONDS = 30
# Modules of the processes that delete the leftovers of an interrupted sweep, and warn of each leftover.
_TRACKERS = ("loky.backend.resource_tracker", "multiprocessing.resource_tracker")

_Numbered = tuple[int, Task]  # a task's index among all tasks, and the task
Run = Callable[[Task], TaskResult]


class Pool(Struct, frozen=True):
    """A pool of workers that run tasks: local processes, or a Dask cluster."""

    size: int  # number of tasks that run at the same time
    died: tuple[type[BaseException], ...]  # the errors that a future raises if its worker died
    executor: Callable[[], AbstractContextManager[Executor]]  # starts workers; local workers end on exit
    close: Callable[[], object]  # releases what the workers need


def run_all(tasks: Sequence[Task], pool: Pool, run: Run) -> Iterator[tuple[int, TaskResult]]:
    """Run tasks, and yield each task's index and result as soon as it ends.

    The result of a task that kills its worker even when it runs alone is a failure.
    """
    queue = deque(enumerate(tasks))
    while queue:
        suspects: list[_Numbered] = []
        yield from _run_until_death(queue, pool.size, pool, run, suspects)
        for suspect in suspects:
            alone: list[_Numbered] = []
            yield from _run_until_death(deque([suspect]), 1, pool, run, alone)
            for place, task in alone:
                yield (
                    place,
                    TaskResult(failure=f"{task.job.model.name}: its process died; see why with --isolate"),
                )


def _run_until_death(
    queue: deque[_Numbered], width: int, pool: Pool, run: Run, suspects: list[_Numbered]
) -> Iterator[tuple[int, TaskResult]]:
    """Run queued tasks and yield their results, and submit no more tasks once a worker dies.

    The tasks that were running when it died are added to `suspects`.
    """
    running: dict[Future[TaskResult], _Numbered] = {}
    with pool.executor() as executor:
        while running or (queue and not suspects):
            # Submitted one by one, so that no task waits behind a long task.
            while queue and not suspects and len(running) < width:
                try:
                    running[executor.submit(run, queue[0][1])] = queue[0]
                except pool.died:
                    if not running:
                        suspects.append(queue.popleft())
                    break
                queue.popleft()
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                place, task = running.pop(future)
                try:
                    yield place, future.result()
                except pool.died:
                    suspects.append((place, task))


def local_pool(size: int) -> Pool:
    """Return a pool of processes on the local machine, which are killed on exit from the executor."""
    loky = _import("loky", "sweep")

    @contextmanager
    def executor() -> Iterator[Executor]:
        filters = ",".join([*sys.warnoptions, *(f"ignore::UserWarning:{name}" for name in _TRACKERS)])
        with warnings.catch_warnings(), mock.patch.dict("os.environ", PYTHONWARNINGS=filters):
            processes = loky.ProcessPoolExecutor(size, initializer=_print_to_stderr)
            warnings.simplefilter("ignore")  # loky's advice about memory that a worker took
            try:
                yield processes
            finally:
                processes.shutdown(kill_workers=True)

    return Pool(size, (loky.process_executor.BrokenProcessPool,), executor, lambda: None)


def dask_pool(scheduler: str) -> Pool:
    """Return a pool of the workers of a Dask cluster. Raises UsageError if no worker answers."""
    distributed = _import("distributed", "dask")
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
    size = max(1, sum(client.ncores().values()))
    # Once the client is closed, no thread looks for a cluster that is gone.
    executor = partial(client.get_executor, pure=False)
    return Pool(size, (distributed.scheduler.KilledWorker,), executor, client.close)


def _print_to_stderr() -> None:
    """Redirect a worker's standard output to standard error. Models must not print into the results."""
    os.dup2(2, 1)


def _import(module: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ModelError(f"{module} is not installed; pip install 'gpu-batch-planner[{extra}]'") from error
