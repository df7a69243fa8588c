from .blocks import Block as Block, SegmentEvent as SegmentEvent
from .caching_allocator import CachingAllocator as CachingAllocator
from .config import (
    AllocatorConfig as AllocatorConfig, MemoryLimits as MemoryLimits, ReuseOrder as ReuseOrder,
    UNLIMITED as UNLIMITED, config_of_torch as config_of_torch, max_reserved_bytes as max_reserved_bytes,
    parse_alloc_conf as parse_alloc_conf,
)
from .player import Player as Player
from .replay import (
    Failure as Failure, PhasePeak as PhasePeak, Replay as Replay,
    ReplayedProcess as ReplayedProcess, highest as highest, replay_trace as replay_trace,
    replay_with_breakdown as replay_with_breakdown,
)
from .several_limits import (
    is_limit_independent as is_limit_independent, replay_under_limits as replay_under_limits,
)
from .timeline import (
    Timeline as Timeline, TimelineRecorder as TimelineRecorder, thin as thin,
)
