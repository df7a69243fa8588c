from .anonymous import anonymous_history as anonymous_history
from .check import HistoryCheck as HistoryCheck, check_history as check_history
from .diff import (
    Difference as Difference, Kind as Kind, LifetimeDifference as LifetimeDifference, SidePeak as SidePeak,
    compare_with_recording as compare_with_recording,
)
from .file import save_history as save_history
from .history import (
    ACTIONS as ACTIONS, MOST_EVENTS as MOST_EVENTS, History as History, HistoryEvent as HistoryEvent,
    HistoryMark as HistoryMark,
)
from .lifetimes import (
    Recording as Recording, interleave as interleave, lifetimes as lifetimes, recording_of as recording_of,
    to_events as to_events,
)
from .profiler_trace import (
    is_profiler_trace as is_profiler_trace, load_profiler_trace as load_profiler_trace,
)
from .published_file import (
    PublishedHistory as PublishedHistory, beginning_of as beginning_of, load_any_history as load_any_history,
    load_published as load_published,
    save_published as save_published,
)
from .snapshot_reader import (
    load_snapshot as load_snapshot, load_snapshots as load_snapshots, stream_numbers as stream_numbers,
    with_events as with_events,
)
from .snapshot_writer import save_snapshot as save_snapshot
