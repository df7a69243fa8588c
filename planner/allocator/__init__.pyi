from .blocks import Block as Block, SegmentEvent as SegmentEvent, SegmentState as SegmentState
from .caching_allocator import CachingAllocator as CachingAllocator
from .config import (
    AllocatorRules as AllocatorRules, ReuseOrder as ReuseOrder, parse_alloc_conf as parse_alloc_conf,
    rules_of_torch as rules_of_torch,
)
from .replay import (
    Arena as Arena, Failure as Failure, Replay as Replay, UNLIMITED as UNLIMITED,
    after_refusal as after_refusal, open_allocator as open_allocator, replay_trace as replay_trace,
    replay_with_breakdown as replay_with_breakdown, room_bytes as room_bytes,
)
from .timeline import (
    PhasePeak as PhasePeak, Timeline as Timeline, TimelineRecorder as TimelineRecorder,
    phase_peaks as phase_peaks, thin as thin,
)
