"""The command `planner sweep`."""

import os
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument

from planner.cli.options import (
    CALIBRATIONS,
    AllowCode,
    Answer,
    Catalogue,
    Confidence,
    Isolate,
    TimeLimit,
    option,
    with_options,
)
from planner.errors import UsageError, unsaved
from planner.hardware import check_confidence
from planner.jobs import allowed_sources, check_count, load_catalogue, shown
from planner.program import OnProgress

if TYPE_CHECKING:
    from planner.planning.sweep import Pool

MAX_PROCESSES = 1024
LOCAL, DASK = "local", "dask"
_SHARED = {"isolate": Isolate, "time_limit": TimeLimit, "confidence": Confidence, **CALIBRATIONS}


@with_options(_SHARED)
def sweep_command(
    options: dict[str, Any],
    on_progress: OnProgress,
    file: Annotated[str | None, Argument(metavar="FILE", help="A grid of models, recipes and GPUs in YAML.")],
    jobs: Annotated[int | None, option("N", "Number of processes; by default one per core.")],
    engine: Annotated[str | None, option("NAME", "local (the default) or dask.")],
    scheduler: Annotated[
        str | None, option("ADDRESS", "Address of the Dask cluster, such as tcp://10.0.0.1:8786.")
    ],
    results: Annotated[
        Path | None, option("DIR", "Folder of finished jobs; by default FILE with .results instead of .yaml.")
    ],
    csv: Annotated[Path | None, option("FILE", "Write the cells as comma-separated values.")],
    parquet: Annotated[Path | None, option("FILE", "Write the cells as a Parquet file.")],
    models: Catalogue,
    allow_code: AllowCode,
) -> Answer:
    """Plan a grid of models, recipes and GPUs. Finished jobs are kept and not planned again."""
    if file is None:
        raise UsageError("FILE is missing: name a sweep file; docs/sweep.md shows one")
    from planner._support.atomic_write import write_bytes
    from planner.api.request.request import isolation_limit
    from planner.api.sweep import sweep
    from planner.planning.sweep import load_grid, open_results
    from planner.report import sweep_to_csv, sweep_to_parquet

    path = Path(file)
    with closing(_open_pool(engine, scheduler, jobs)) as pool:
        isolation_limit(options)
        if options["confidence"] is not None:
            check_confidence(options["confidence"])
        sources = allowed_sources({"allow_code": allow_code})
        catalogue = load_catalogue(None if models is None else Path(models), sources)
        grid = load_grid(path, catalogue, sources)
        given = [*map(Path, options["calibrations"] or ()), *filter(None, [options["own_calibrations"]])]
        folder = path.with_suffix(".results") if results is None else results
        store = open_results(folder, given, on_progress)
        swept = sweep(grid, catalogue, options, store, pool, on_progress)
    with unsaved(swept):
        if csv is not None:
            write_bytes(csv, sweep_to_csv(swept.table).encode())
        if parquet is not None:
            write_bytes(parquet, sweep_to_parquet(swept.table))
    return swept, not swept.table.failures


def _open_pool(engine: str | None, scheduler: str | None, jobs: int | None) -> "Pool":
    from planner.planning.sweep import dask_pool, local_pool

    if engine not in (None, LOCAL, DASK):
        raise UsageError(f"--engine: unknown value {shown(engine)}; use one of {LOCAL}, {DASK}")
    if engine == DASK:
        if scheduler is None:
            raise UsageError("--engine dask: say where the cluster is: --scheduler tcp://HOST:8786")
        if jobs is not None:
            raise UsageError("--jobs and --engine dask: the cluster has its own; remove --jobs")
        return dask_pool(scheduler)
    if scheduler is not None:
        raise UsageError("--scheduler: it is that of --engine dask; add that")
    if jobs is not None:
        return local_pool(check_count("--jobs", jobs, MAX_PROCESSES))
    is_linux = hasattr(os, "sched_getaffinity")  # elsewhere a process has all cores
    return local_pool(len(os.sched_getaffinity(0)) if is_linux else os.cpu_count() or 1)
