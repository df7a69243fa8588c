from .advice import Advice as Advice, Attempt as Attempt, advise as advise
from .attribution import (
    DisplayLimits as DisplayLimits, Explanation as Explanation, LiveBlock as LiveBlock,
    ModuleShare as ModuleShare, PeakLocation as PeakLocation, explain as explain, fold as fold,
)
from .batch_curve import BatchCurve as BatchCurve, DeviceCurve as DeviceCurve, take_curve as take_curve
from .changes import Change as Change, TrainingConfig as TrainingConfig
from .clusters.rank_traces import RankTraces as RankTraces
from .clusters.search import (
    ClusterAdvice as ClusterAdvice, ClusterPlan as ClusterPlan, ClusterPlans as ClusterPlans,
    ClusterSearch as ClusterSearch,
    ClusterTable as ClusterTable, find_clusters as find_clusters,
)
from .clusters.splits import (
    ClusterQuestion as ClusterQuestion, Gathers as Gathers, MOST_GPUS as MOST_GPUS,
    SplitRecipe as SplitRecipe,
)
from .epoch import (
    EpochPrograms as EpochPrograms, check_batch as check_batch, max_useful_batch as max_useful_batch,
    steps_of_epoch as steps_of_epoch,
    with_last_batch as with_last_batch,
)
from .estimate import (
    Answer as Answer, Estimate as Estimate, RankFigures as RankFigures, Seconds as Seconds,
    estimate_batch as estimate_batch, unlimited as unlimited,
)
from .search.fleet import (
    DeviceFit as DeviceFit, FleetTable as FleetTable, curve as curve, fit_devices as fit_devices,
)
from .growth_limit import StepLimit as StepLimit
from .host_memory import HostMemory as HostMemory
from .search.max_batch import Plan as Plan, find_max_batch as find_max_batch
from .search.max_size import (
    SizePlan as SizePlan, find_max_size as find_max_size, sizes_between as sizes_between,
)
from .phases import JobPhase as JobPhase, JobPhasePeak as JobPhasePeak
from .programs import (
    CaptureMode as CaptureMode, Factory as Factory, complete_from_library as complete_from_library,
    open_programs as open_programs, open_traces as open_traces,
)
from .quote import Quote as Quote
from .ranks import (
    count_ranks as count_ranks, is_worse as is_worse, ranks_to_plan as ranks_to_plan,
    with_ranks as with_ranks,
)
from .search.replays import TimedPrograms as TimedPrograms
from .serving import (
    ServingPlan as ServingPlan, ServingSettings as ServingSettings, plan_serving as plan_serving,
)
from .retry_cost import RetryCost as RetryCost
from .varying.advice import (
    VaryingAdvice as VaryingAdvice, VaryingAttempt as VaryingAttempt, advise_varying as advise_varying,
)
from .varying.plan import (
    VaryingPlan as VaryingPlan, VaryingSide as VaryingSide, check_varying as check_varying,
    estimate_varying as estimate_varying, find_varying_batch as find_varying_batch,
    find_varying_fit as find_varying_fit,
)
from .varying.programs import SizedPrograms as SizedPrograms
from .varying.risk import RunRisk as RunRisk, SampledRun as SampledRun
