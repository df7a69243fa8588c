from .advice import Advice as Advice, Trial as Trial, advise as advise
from .attribution import (
    Explanation as Explanation, LiveBlock as LiveBlock, ModuleShare as ModuleShare, Moment as Moment,
    Shown as Shown, explain as explain, fold as fold,
)
from .batch_curve import BatchCurve as BatchCurve, CardCurve as CardCurve, take_curve as take_curve
from .changes import Recipe as Recipe
from .epoch import check_batch as check_batch, over_epoch as over_epoch
from .fleet import (
    CardFit as CardFit, CardTable as CardTable, OverEpoch as OverEpoch, curve as curve,
    fit_cards as fit_cards,
)
from .growth_limit import StepLimit as StepLimit
from .max_batch import (
    Estimate as Estimate, FIT_BATCHES as FIT_BATCHES, OnProgress as OnProgress, Plan as Plan,
    Seconds as Seconds, TraceSource as TraceSource, estimate as estimate, plan_max_batch as plan_max_batch,
    without_end as without_end,
)
from .retry_cost import RetryCost as RetryCost
from .search import LARGEST_BATCH as LARGEST_BATCH
from .source import (
    Factory as Factory, Take as Take, Workload as Workload, complete_from_library as complete_from_library,
    kept_workload as kept_workload, load_workload as load_workload, save_workload as save_workload,
    starter_of as starter_of, take_alone as take_alone, take_detailed_trace as take_detailed_trace,
    take_trace as take_trace, trace_workload as trace_workload,
)
