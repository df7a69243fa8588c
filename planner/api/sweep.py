"""Plan a grid of models, recipes and GPUs.

One capture of a model in a recipe serves all GPUs. A worker's result is stored immediately and not computed
again by a later call. A job that fails is reported, and the other jobs continue.
"""

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import product
from time import perf_counter
from typing import Any, cast

import msgspec
from msgspec.structs import replace

from planner.api.fleet.gpus import gpus
from planner.api.request.options import Options
from planner.api.request.varying import check_any_sizes
from planner.errors import PlannerError, UsageError
from planner.jobs import CatalogueEntry, resolve_job
from planner.planning.sweep import (
    Cell,
    Failure,
    GpuFigures,
    Grid,
    Pool,
    ResultStore,
    SweepTable,
    Task,
    TaskResult,
    device_digest,
    run_all,
)
from planner.program import OnProgress
from planner.report import Report, Result, report_of

# A worker of a Dask cluster may have several threads; captures run one at a time in a process.
_ONE_CAPTURE = threading.Lock()


@dataclass(frozen=True, slots=True)
class SweepResult(Result):
    """The largest batch of each model and recipe on each GPU of a sweep. `str` gives the text report."""

    table: SweepTable

    def _report(self) -> Report:
        from planner.report import sweep_document, sweep_to_json

        return report_of(sweep_document, sweep_to_json, self.table)


def sweep(
    grid: Grid,
    catalogue: Mapping[str, CatalogueEntry],
    options: Mapping[str, Any],
    store: ResultStore,
    pool: Pool,
    on_progress: OnProgress,
) -> SweepResult:
    """Compute the missing cells of a grid, and return the table of all cells.

    A cell is missing if the store lacks it. Raises DataFileError if a result cannot be written; results
    written before are kept. `options` are options of `planner.gpus` for all jobs.
    """
    start = perf_counter()
    tasks, failures = _tasks(grid, catalogue, options)
    results = {key: store.find(task) for key, task in tasks.items()}
    missing = (_without(task, results[key]) for key, task in tasks.items())
    to_run = [task for task in missing if task.devices]
    on_progress(f"{len(to_run)} of {len(tasks)} jobs to run")
    new = 0
    for ended, (place, result) in enumerate(run_all(to_run, pool, run_task), 1):
        task = to_run[place]
        key = task.model, task.recipe
        if result.failure:
            failures[key] = result.failure
        else:
            store.keep(task, result)
            results[key] = _merge(results[key], result)
            new += len(result.cells)
        failed = f", {len(failures)} failed" if failures else ""
        on_progress(f"{ended} of {len(to_run)} jobs{failed}; {' '.join(key)} took {result.seconds:.1f} s")
    table = SweepTable(
        grid,
        tuple(_cells(grid, results)),
        tuple(Failure(*key, failures[key]) for key in _keys(grid) if key in failures),
        tuple(dict.fromkeys(note for result in results.values() for note in result.notes)),
        tuple(sorted({op for result in results.values() for op in result.unknown_ops})),
        new,
        perf_counter() - start,
    )
    return SweepResult(table)


def run_task(task: Task) -> TaskResult:
    """Plan a task's job in this process, and return the figures of each of its GPUs, or why it failed."""
    start = perf_counter()
    try:
        with _ONE_CAPTURE, redirect_stdout(sys.stderr):
            answer = gpus(task.job, devices=task.devices, **cast(Options, task.options)).to_dict()
    except BaseException as error:  # a model's error or ours: the other jobs continue
        unexpected = f"internal error: {type(error).__name__}: {str(error)[:300]}"
        failure = str(error) if isinstance(error, PlannerError) else unexpected
        return TaskResult(failure=" ".join(failure.split()), seconds=perf_counter() - start)
    rows = {row["gpu"]: msgspec.convert(row, GpuFigures) for row in answer["rows"]}
    return TaskResult(
        {device_digest(device): rows[device.name] for device in task.devices},
        tuple(answer["assumptions"]),
        tuple(answer["unknown_ops"]),
        perf_counter() - start,
    )


_Key = tuple[str, str]  # the names of a model and of a recipe


def _keys(grid: Grid) -> Iterator[_Key]:
    return ((model.name, recipe.name) for model in grid.models for recipe in grid.recipes)


def _tasks(
    grid: Grid, catalogue: Mapping[str, CatalogueEntry], options: Mapping[str, Any]
) -> tuple[dict[_Key, Task], dict[_Key, str]]:
    """Return the tasks of valid jobs and the error messages of invalid jobs, by model and recipe."""
    tasks: dict[_Key, Task] = {}
    failures: dict[_Key, str] = {}
    for model, recipe in product(grid.models, grid.recipes):
        key = model.name, recipe.name
        memory = {"alloc_conf": recipe.alloc_conf, "allocator_cap_mib": recipe.allocator_cap_mib}
        try:
            job = resolve_job(model.model, catalogue, **{**model.options, **recipe.options})
            check_any_sizes(job)
        except UsageError as error:
            failures[key] = str(error)
        else:
            tasks[key] = Task(*key, job, grid.gpus, {**options, **memory})
    return tasks, failures


def _without(task: Task, stored: TaskResult) -> Task:
    """Return the task for only the GPUs whose cells are not stored."""
    devices = tuple(device for device in task.devices if device_digest(device) not in stored.cells)
    return replace(task, devices=devices)


def _merge(one: TaskResult, other: TaskResult) -> TaskResult:
    return replace(
        other,
        cells={**one.cells, **other.cells},
        notes=tuple(dict.fromkeys((*one.notes, *other.notes))),
        unknown_ops=tuple(dict.fromkeys((*one.unknown_ops, *other.unknown_ops))),
    )


def _cells(grid: Grid, results: Mapping[_Key, TaskResult]) -> Iterator[Cell]:
    digests = [device_digest(device) for device in grid.gpus]
    for key in _keys(grid):
        cells = results[key].cells if key in results else {}
        yield from (Cell(*key, cells[digest]) for digest in digests if digest in cells)
