from .blocks import Block as Block, SegmentEvent as SegmentEvent, SegmentState as SegmentState
from .caching_allocator import CachingAllocator as CachingAllocator
from .config import (
    AllocatorConfig as AllocatorConfig, ReuseOrder as ReuseOrder, config_of_torch as config_of_torch,
    parse_alloc_conf as parse_alloc_conf,
)
from .replay import (
    Failure as Failure, MemoryLimits as MemoryLimits, Replay as Replay, UNLIMITED as UNLIMITED,
    max_reserved_bytes as max_reserved_bytes, new_allocator as new_allocator, replay_trace as replay_trace,
    replay_with_breakdown as replay_with_breakdown, retry_optional as retry_optional,
)
from .timeline import (
    PhasePeak as PhasePeak, Timeline as Timeline, TimelineRecorder as TimelineRecorder,
    phase_peaks as phase_peaks, thin as thin,
)
