from .executors import (
    DaskEngine as DaskEngine,
    Engine as Engine,
    LocalEngine as LocalEngine,
    run_all as run_all,
)
from .grid import (
    Grid as Grid,
    NamedModel as NamedModel,
    Recipe as Recipe,
    load_grid as load_grid,
)
from .results import (
    Store as Store,
    open_store as open_store,
)
from .table import (
    Cell as Cell,
    Failure as Failure,
    SweepTable as SweepTable,
)
from .task import (
    Done as Done,
    Task as Task,
    device_digest as device_digest,
)
