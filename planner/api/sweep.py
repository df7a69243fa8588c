"""A grid of models, recipes and GPUs: each model in each recipe is traced once and planned for all GPUs.

What a worker found is kept at once, and not computed again by a later call; a job that fails is told, and the
others go on.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from time import perf_counter
from typing import Any

from planner.errors import UsageError
from planner.jobs import CatalogueEntry, resolve_job
from planner.planning import OnProgress
from planner.planning.sweep import (
    Cell,
    Done,
    Engine,
    Failure,
    Grid,
    NamedModel,
    Recipe,
    Store,
    SweepTable,
    Task,
    device_digest,
    run_all,
)


@dataclass(frozen=True, slots=True)
class SweepResult:
    """The grid with its cells; `str` gives the tables."""

    table: SweepTable

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of `planner sweep`."""
        from planner.report.commands import sweep_to_json

        return sweep_to_json(self.table)

    def __str__(self) -> str:
        from planner.report.commands import sweep_text

        return sweep_text(self.table)


def sweep(
    grid: Grid,
    catalogue: Mapping[str, CatalogueEntry],
    options: Mapping[str, Any],
    store: Store,
    engine: Engine,
    tell: OnProgress,
) -> SweepResult:
    """Compute what the store does not have yet; `options` are those of `planner.gpus` for all jobs.

    Raises DataFileError where a result cannot be kept; what was kept before stays.
    """
    start = perf_counter()
    tasks, failures = _tasks(grid, catalogue, options)
    found = {key: store.find(task) for key, task in tasks.items()}
    left = [(key, _missing(task, found[key])) for key, task in tasks.items()]
    asked = [(key, task) for key, task in left if task.devices]
    tell(f"{len(asked)} of {len(tasks)} jobs to run")
    new = 0
    for ended, (place, done) in enumerate(run_all([task for _, task in asked], engine), 1):
        key, task = asked[place]
        if done.failure:
            failures[key] = done.failure
        else:
            store.keep(task, done)
            found[key] = _together(found[key], done)
            new += len(done.cells)
        failed = f", {len(failures)} failed" if failures else ""
        tell(f"{ended} of {len(asked)} jobs{failed}; {' '.join(key)} took {done.seconds:.1f} s")
    table = SweepTable(
        grid,
        tuple(_cells(grid, found)),
        tuple(Failure(*key, failures[key]) for key in _keys(grid) if key in failures),
        tuple(dict.fromkeys(note for done in found.values() for note in done.notes)),
        tuple(sorted({op for done in found.values() for op in done.unknown_ops})),
        new,
        perf_counter() - start,
    )
    return SweepResult(table)


_Key = tuple[str, str]  # the names of a model and of a recipe


def _keys(grid: Grid) -> Iterator[_Key]:
    return ((model.name, recipe.name) for model in grid.models for recipe in grid.recipes)


def _tasks(
    grid: Grid, catalogue: Mapping[str, CatalogueEntry], options: Mapping[str, Any]
) -> tuple[dict[_Key, Task], dict[_Key, str]]:
    """The jobs of the grid, and why some of them make none."""
    tasks: dict[_Key, Task] = {}
    failures: dict[_Key, str] = {}
    for model in grid.models:
        for recipe in grid.recipes:
            try:
                tasks[model.name, recipe.name] = _task(grid, model, recipe, catalogue, options)
            except UsageError as error:
                failures[model.name, recipe.name] = str(error)
    return tasks, failures


def _task(
    grid: Grid,
    model: NamedModel,
    recipe: Recipe,
    catalogue: Mapping[str, CatalogueEntry],
    options: Mapping[str, Any],
) -> Task:
    chosen = {**model.options, **recipe.options}
    job = resolve_job(model.model, catalogue, **chosen)
    memory = {"alloc_conf": recipe.alloc_conf, "allocator_cap_mib": recipe.allocator_cap_mib}
    return Task(model.name, recipe.name, job, grid.gpus, {**options, **memory})


def _missing(task: Task, found: Done) -> Task:
    devices = tuple(device for device in task.devices if device_digest(device) not in found.cells)
    return replace(task, devices=devices)


def _together(one: Done, other: Done) -> Done:
    return replace(
        other,
        cells={**one.cells, **other.cells},
        notes=tuple(dict.fromkeys((*one.notes, *other.notes))),
        unknown_ops=tuple(dict.fromkeys((*one.unknown_ops, *other.unknown_ops))),
    )


def _cells(grid: Grid, found: Mapping[_Key, Done]) -> Iterator[Cell]:
    names = [field.name for field in fields(Cell)]
    digests = [device_digest(device) for device in grid.gpus]
    for model, recipe in _keys(grid):
        known = found[model, recipe].cells if (model, recipe) in found else {}
        for digest in digests:
            if digest in known:
                said = {**known[digest], "model": model, "recipe": recipe}
                yield Cell(**{name: said[name] for name in names})
