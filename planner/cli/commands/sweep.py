"""`planner sweep`."""

import os
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from planner.cli.declared import AllowCode, Catalogue, Confidence, Isolate, TimeLimit
from planner.cli.options import (
    CalibrationOptions,
    OutputOptions,
    Text,
    takes,
    values_of,
    whole,
)
from planner.cli.output import answer, working
from planner.cli.words import Argument, Option
from planner.errors import UsageError
from planner.jobs import check_count, shown
from planner.planning import OnProgress

if TYPE_CHECKING:
    from planner.api.sweep import SweepResult
    from planner.planning.sweep import Pool

MOST_JOBS = 1024
LOCAL, DASK = "local", "dask"


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """Which grid, where it runs, and where it is kept."""

    file: Annotated[Text, Argument(metavar="FILE", help="A grid of models, recipes and GPUs in YAML.")] = None
    jobs: Annotated[Text, Option(metavar="N", help="Number of processes; by default one per core.")] = None
    engine: Annotated[Text, Option(metavar="NAME", help="local (the default) or dask.")] = None
    scheduler: Annotated[
        Text, Option(metavar="ADDRESS", help="Address of the Dask cluster, such as tcp://10.0.0.1:8786.")
    ] = None
    results: Annotated[
        Text,
        Option(
            metavar="DIR", help="Folder of finished jobs; by default FILE with .results instead of .yaml."
        ),
    ] = None
    csv: Annotated[Text, Option(metavar="FILE", help="Write the cells as comma-separated values.")] = None
    parquet: Annotated[Text, Option(metavar="FILE", help="Write the cells as a Parquet file.")] = None
    models: Catalogue = None
    allow_code: AllowCode = False
    isolate: Isolate = False
    time_limit: TimeLimit = None
    confidence: Confidence = None


@takes(SweepOptions, CalibrationOptions, OutputOptions)
def sweep_command(options: SweepOptions, stored: CalibrationOptions, output: OutputOptions) -> int:
    """Plan a grid of models, recipes and GPUs; resumable."""
    if options.file is None:
        raise UsageError("FILE is missing: name a sweep file; docs/sweep.md shows one")
    with working() as tell:
        swept = _run(options, stored, Path(options.file), tell)
    answer(swept, output)
    _write(swept, options)
    return 1 if swept.table.failures else 0


def _run(options: SweepOptions, stored: CalibrationOptions, path: Path, tell: OnProgress) -> "SweepResult":
    from planner.api.sweep import sweep
    from planner.capture.subprocess import limit_of
    from planner.jobs import allowed_sources, load_catalogue
    from planner.planning.sweep import load_grid, open_results

    given = values_of(options)
    shared: dict[str, Any] = stored.keywords()
    shared |= {name: given[name] for name in ("isolate", "time_limit", "confidence")}
    limit_of(shared)
    sources = allowed_sources({"allow_code": options.allow_code})
    catalogue = load_catalogue(None if options.models is None else Path(options.models), sources)
    grid = load_grid(path, catalogue, sources)
    folder = path.with_suffix(".results") if options.results is None else Path(options.results)
    calibrations = [*map(Path, shared["calibrations"] or ()), *filter(None, [shared["own_calibrations"]])]
    store = open_results(folder, calibrations, tell)
    with closing(_pool(options)) as pool:
        return sweep(grid, catalogue, shared, store, pool, tell)


def _pool(options: SweepOptions) -> "Pool":
    from planner.planning.sweep import DaskPool, LocalPool

    jobs = whole("--jobs", options.jobs, "2")
    name = options.engine or LOCAL
    if name not in (LOCAL, DASK):
        raise UsageError(f"--engine: unknown value {shown(name)}; use one of {LOCAL}, {DASK}")
    if name == DASK:
        if options.scheduler is None:
            raise UsageError("--engine dask: say where the cluster is: --scheduler tcp://HOST:8786")
        if jobs is not None:
            raise UsageError("--jobs and --engine dask: the cluster has its own; leave --jobs away")
        return DaskPool(options.scheduler)
    if options.scheduler is not None:
        raise UsageError("--scheduler: it is that of --engine dask; add that")
    return LocalPool(len(os.sched_getaffinity(0)) if jobs is None else check_count("--jobs", jobs, MOST_JOBS))


def _write(swept: "SweepResult", options: SweepOptions) -> None:
    """After the answer, so that a file that cannot be written costs no answer."""
    from planner._support.atomic_write import write_bytes
    from planner.report import sweep_to_csv, sweep_to_parquet

    if options.csv is not None:
        write_bytes(Path(options.csv), sweep_to_csv(swept.table).encode())
    if options.parquet is not None:
        write_bytes(Path(options.parquet), sweep_to_parquet(swept.table))
