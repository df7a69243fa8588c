from .executors import Pool as Pool, dask_pool as dask_pool, local_pool as local_pool, run_all as run_all
from .grid import (
    Cell as Cell, Failure as Failure, Grid as Grid, SweepTable as SweepTable, load_grid as load_grid,
)
from .results import ResultStore as ResultStore, open_results as open_results
from .task import (
    GpuFigures as GpuFigures, Task as Task, TaskResult as TaskResult, device_digest as device_digest,
)
