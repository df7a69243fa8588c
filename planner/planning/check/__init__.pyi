from .changes import (
    CheckChange as CheckChange, Comparison as Comparison, ModuleChange as ModuleChange,
    SMALLEST_BYTES as SMALLEST_BYTES,
    module_changes as module_changes, own_bytes as own_bytes,
)
from .config import (
    CheckConfig as CheckConfig, CheckJob as CheckJob, FailOn as FailOn, Headroom as Headroom,
    find_config as find_config, load_config as load_config, parse_size as parse_size,
)
from .revision import Revision as Revision, export_revision as export_revision
from .rows import CheckFailure as CheckFailure, CheckRow as CheckRow
from .verdict import (
    Judgement as Judgement, Verdict as Verdict, judge as judge, largest_that_holds as largest_that_holds,
)
