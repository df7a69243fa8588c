from .affine import align as align, refit as refit, rounded_line as rounded_line
from .bounds import Floor as Floor, least_bytes as least_bytes
from .convolution import (
    ConvWorkspace as ConvWorkspace, Convolution as Convolution, Direction as Direction, Engine as Engine,
    Workspaces as Workspaces,
)
from .cublas import parse_workspace_config as parse_workspace_config, workspace_bytes as workspace_bytes
from .events import (
    Alloc as Alloc, Category as Category, Event as Event, FROM_CHANCE as FROM_CHANCE, Free as Free,
    GrowthSource as GrowthSource, Outcome as Outcome, Phase as Phase, PhaseStart as PhaseStart,
    RANDOM_COURSE as RANDOM_COURSE, Site as Site, TensorProvenance as TensorProvenance, Trace as Trace,
    check as check,
)
from .expr import (
    Answer as Answer, BATCH as BATCH, CONSTANT as CONSTANT, Case as Case, Guard as Guard,
    MULTIPROCESSORS as MULTIPROCESSORS, Node as Node, work_out as work_out,
)
from .growth import (
    GrowingSite as GrowingSite, Growth as Growth, find_growth as find_growth,
    growing_blocks as growing_blocks,
)
from .steps import (
    Action as Action, Ask as Ask, GiveBack as GiveBack, Keep as Keep, Loop as Loop, fold as fold,
)
from .stored_loop import (
    Answers as Answers, Capability as Capability, Kernel as Kernel, StoredLoop as StoredLoop,
    Written as Written, kernel_events as kernel_events, loop_from_json as loop_from_json,
    loops_to_json as loops_to_json, tried as tried, written as written,
)
from .target import SM_LIMITS as SM_LIMITS, Target as Target, threads_per_sm as threads_per_sm
