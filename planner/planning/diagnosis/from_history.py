"""Diagnose a recorded history of the allocator, and replay its requests under other settings."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice

from msgspec.structs import replace

from planner.allocator import AllocatorConfig, MemoryLimits, config_of_torch, parse_alloc_conf, replay_trace
from planner.allocator.history import History, HistoryEvent, check_history, to_events
from planner.planning.diagnosis.diagnosis import (
    Cause,
    Diagnosis,
    Held,
    Help,
    Place,
    names_evaluation,
    size_text,
)
from planner.planning.diagnosis.on_gpus import gpus_serving
from planner.program import Category, Outcome, Site, Trace

_MOST_HELD = 12
_OLDER = "in use before the recording began"
_LEAST_RISES = 4  # of the level to which memory falls back, that are called growth
SETTINGS = (
    *("expandable_segments:True", "max_split_size_mb:128", "garbage_collection_threshold:0.8"),
    "max_split_size_mb:128,garbage_collection_threshold:0.8",
)


def diagnose_history(history: History, source: str) -> Diagnosis:
    """Diagnose the last out-of-memory error of a history, or tell what lived at its peak if it has none.

    Raises UsageError if the allocator options of the history are not simulated.
    """
    found, at = _diagnose(history, source)
    parts, notes = _by_category(history, at)
    return replace(found, by_category=parts, notes=(*notes, *found.notes))


def _diagnose(history: History, source: str) -> tuple[Diagnosis, int]:
    """Return the diagnosis without categories, and the event before which its blocks were in use."""
    ends = [at for at, event in enumerate(history.events) if event.action == "oom"]
    levels = _levels(history)
    if not ends:
        peak = max(range(len(levels)), key=levels.__getitem__)
        return _of_peak(history, source, levels, peak), peak
    end = ends[-1]
    failed = history.events[end]
    allocated, reserved = levels[end], _reserved(history)[end]
    site = _site(history, failed)
    live = _live(history, end)
    cause, reason, grown = _cause(history, end, levels, allocated, reserved, site)
    place = Place(" in ".join(filter(None, (site.module, site.op))), "")
    notes = tuple(history.notes)
    if len(ends) > 1:
        notes = (f"the history has {len(ends)} out-of-memory errors; this is the last", *notes)
    trace = _trace(history, end)
    found = Diagnosis(
        source,
        cause,
        reason,
        failed.size_bytes,
        allocated,
        reserved,
        history.total_bytes,
        grown or place,
        live,
        would_help=_replays(trace, history, end, reserved, check_history(history).refused_bytes),
        notes=notes,
        served_by=gpus_serving(trace, _config(history)),
    )
    return found, end


def _of_peak(history: History, source: str, levels: Sequence[int], peak: int) -> Diagnosis:
    """Return a diagnosis of the memory in use at the peak of a history in which no request failed."""
    reserved = max(_reserved(history))
    cause, reason = Cause.NO_FAILURE, "what was in use at the peak is below"
    check = check_history(history)
    if check.retries:
        requests = "1 request was" if check.retries == 1 else f"{check.retries:,} requests were"
        reason = f"{requests} served only after cached memory was released; {reason}"
    end, place = len(history.events), Place()
    floors = _floors(levels)
    if floors:
        place, share = _growing(history, end)
        reason = (
            f"{_growth_text(floors, share)}{_end_text(floors, levels[peak], history.total_bytes)}; {reason}"
        )
    if not history.events:
        cause = Cause.UNKNOWN
        reason = (
            "no history was recorded, so that the snapshot shows one moment: call "
            "torch.cuda.memory._record_memory_history() before, or use planner.watch(record=True)"
        )
    trace = _trace(history, end)
    return Diagnosis(
        source,
        cause,
        reason,
        None,
        levels[peak],
        reserved,
        history.total_bytes,
        place,
        _live(history, peak),
        would_help=_replays(trace, history, end, reserved, check.refused_bytes),
        notes=history.notes,
        served_by=gpus_serving(trace, _config(history)),
    )


def _cause(
    history: History, end: int, levels: Sequence[int], allocated: int, reserved: int, site: Site
) -> tuple[Cause, str, Place | None]:
    asked = history.events[end].size_bytes
    if asked > allocated:
        together = f"all blocks in use together took {size_text(allocated)}"
        return Cause.ONE_REQUEST, f"{size_text(asked)} were asked for at once; {together}", None
    floors = _floors(levels[: end + 1])
    if floors and floors[-1] - floors[0] >= asked:
        place, share = _growing(history, end)
        return Cause.GROWTH, _growth_text(floors, share), place
    if reserved - allocated >= asked:
        unused = f"{size_text(reserved - allocated)} were reserved and unused"
        reason = f"{unused}, more than the {size_text(asked)} asked for, but in pieces"
        return Cause.FRAGMENTATION, reason, None
    if names_evaluation(site.op):
        return Cause.EVALUATION, f"it happened in {site.op}, an evaluation", None
    reason = f"blocks in use took {size_text(allocated)}, and {size_text(asked)} more were asked for"
    return Cause.TOO_LARGE, reason, None


def _growth_text(floors: Sequence[int], share: int) -> str:
    risen = size_text(floors[-1] - floors[0])
    return (
        f"the level to which memory in use falls rose {len(floors) - 1} times, by {risen} in all; "
        f"{size_text(share)} in the history's second half by one line"
    )


def _end_text(floors: Sequence[int], peak_bytes: int, total_bytes: int | None) -> str:
    """Return after how many more rises the GPU's memory ends; "" if its total is not known."""
    if total_bytes is None or total_bytes <= peak_bytes:
        return ""
    more = (total_bytes - peak_bytes) * (len(floors) - 1) // (floors[-1] - floors[0])
    return f", so that the GPU's {size_text(total_bytes)} end after {more:,} more at the latest"


def _levels(history: History) -> list[int]:
    """Return the bytes in use before each event, and after the last."""
    held = {block.address: block.size_bytes for one in history.start for block in one.blocks if block.in_use}
    config = parse_alloc_conf(history.alloc_conf, config_of_torch(history.torch))
    level = sum(held.values())
    levels = [level]
    for event in history.events:
        if event.action == "alloc" and event.size_bytes:
            held[event.address] = config.block_bytes(event.size_bytes)
            level += held[event.address]
        elif event.action == "free_completed":
            level -= held.pop(event.address, 0)
        levels.append(level)
    return levels


def _reserved(history: History) -> list[int]:
    """Return the reserved bytes before each event, and after the last."""
    signs = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
    level = sum(state.size_bytes for state in history.start)
    levels = [level]
    for event in history.events:
        level += signs.get(event.action, 0) * event.size_bytes
        levels.append(level)
    return levels


def _live(history: History, end: int) -> tuple[Held, ...]:
    """Return the blocks in use before an event, by the code that allocated them; the largest groups."""
    groups: dict[str, list[int]] = defaultdict(list)
    for event in _live_events(history, end):
        site = _site(history, event)
        name = " in ".join(filter(None, (site.module, site.op)))
        groups[name or f"no line of Python, {size_text(event.size_bytes)} each"].append(event.size_bytes)
    for size_bytes in _older(history, end):
        name = _OLDER if history.events else f"blocks of {size_text(size_bytes)}"
        groups[name].append(size_bytes)
    held = sorted((Held(name, sum(sizes), len(sizes)) for name, sizes in groups.items()), key=_by_size)
    return tuple(islice(held, _MOST_HELD))


def _by_category(history: History, end: int) -> tuple[tuple[Held, ...], tuple[str, ...]]:
    """Return the blocks in use before an event by category, and notes on what the categories mean.

    Both are empty if no stack of functions was recorded.
    """
    if not any(history.categories):
        return (), ()
    groups: dict[str, list[int]] = defaultdict(list)
    is_guessed = False
    for event in _live_events(history, end):
        category = history.categories[event.site] if event.site >= 0 else None
        if category is None and not _site(history, event).module:
            category, is_guessed = Category.GRADIENT, True
        groups[category.value if category else "other"].append(event.size_bytes)
    groups[_OLDER] = [*_older(history, end)]
    held = (Held(name, sum(sizes), len(sizes)) for name, sizes in groups.items() if sizes)
    notes = [
        "by category, gradients are all blocks of the backward pass, activations all of a module's forward"
    ]
    if is_guessed:
        notes.append(
            "blocks without a function of Python are counted as gradients: autograd's threads run none"
        )
    return tuple(sorted(held, key=_by_size)), tuple(notes)


def _by_size(held: Held) -> tuple[int, str]:
    return -held.size_bytes, held.what


def _older(history: History, end: int) -> Iterator[int]:
    """Yield the sizes of the blocks that were in use before the recording and are in use before an event."""
    freed = {event.address for event in history.events[:end] if event.action == "free_completed"}
    for state in history.start:
        for block in state.blocks:
            if block.in_use and block.address not in freed:
                yield block.size_bytes


def _live_events(history: History, end: int) -> list[HistoryEvent]:
    live: dict[int, HistoryEvent] = {}
    for event in history.events[:end]:
        if event.action == "alloc" and event.size_bytes:
            live[event.address] = event
        elif event.action == "free_completed":
            live.pop(event.address, None)
    return list(live.values())


def _site(history: History, event: HistoryEvent) -> Site:
    return history.sites[event.site] if 0 <= event.site < len(history.sites) else Site("", "")


def _floors(levels: Sequence[int]) -> list[int]:
    """Return the levels to which memory falls and below which it never falls again, by rising level.

    A fall counts if it is at least half of the largest. The last levels are returned, of which none rises by
    more than memory falls: a step gives back what it takes, and the layers of a forward pass keep it. There
    are none if they rise less often than `_LEAST_RISES`.
    """
    floors: list[tuple[int, int]] = []  # level, and how far memory fell to it
    for level, fall in _falls(levels, _largest_fall(levels) / 2):
        while floors and level <= floors[-1][0]:
            fall = max(fall, floors.pop()[1])
        floors.append((level, fall))
    begin = len(floors) - 1
    while begin > 0 and floors[begin][0] - floors[begin - 1][0] <= floors[begin][1]:
        begin -= 1
    rising = [level for level, _ in floors[max(begin, 0) :]]
    return rising if len(rising) > _LEAST_RISES else []


def _falls(levels: Sequence[int], least: float) -> Iterator[tuple[int, int]]:
    """Yield the level to which memory falls by at least `least`, before it rises as much, and the fall."""
    high = low = levels[0]
    is_falling = False
    for level in levels:
        if is_falling:
            low = min(low, level)
            if level - low >= least:
                yield low, high - low
                high, is_falling = level, False
        else:
            high = max(high, level)
            if high - level >= least > 0:
                low, is_falling = level, True


def _largest_fall(levels: Sequence[int]) -> int:
    highest = fall = 0
    for level in levels:
        highest = max(highest, level)
        fall = max(fall, highest - level)
    return fall


def _growing(history: History, end: int) -> tuple[Place, int]:
    """Return the line whose blocks in use grew most between the middle and the end of a history."""
    changes: dict[Site, int] = defaultdict(int)
    for sign, at in ((-1, end // 2), (1, end)):
        for event in _live_events(history, at):
            changes[_site(history, event)] += sign * event.size_bytes
    site, grown = max(changes.items(), key=_by_growth, default=(Site("", ""), 0))
    return Place(" in ".join(filter(None, (site.module, site.op)))), max(0, grown)


def _by_growth(item: tuple[Site, int]) -> tuple[int, str]:
    return item[1], item[0].module


def _trace(history: History, end: int) -> Trace:
    """Return the requests up to an event, and the event's own if it failed, as a trace."""
    return Trace(tuple(to_events(_requests(history, end))), history.sites, 1)


def _replays(
    trace: Trace, history: History, end: int, reserved: int, refused: int | None
) -> tuple[Help, ...]:
    """Return for each setting whether and in how much memory the requests up to an event fit.

    The GPU had at least what was reserved, and what was free when a request failed; it had less than
    `refused`, the level of reserved memory that it refused, and no more than its total.
    """
    free = history.events[end].address if end < len(history.events) else 0
    enough = reserved + free
    bounds = [bound for bound in (refused and refused - 1, history.total_bytes) if bound]
    most = enough if free else max(enough, min(bounds)) if bounds else None
    return tuple(_replay(trace, history, setting, enough, most) for setting in SETTINGS)


def _requests(history: History, end: int) -> Iterator[HistoryEvent]:
    for state in history.start:
        for block in state.blocks:
            if block.in_use:
                yield HistoryEvent("alloc", block.address, block.size_bytes, stream=state.stream)
    yield from history.events[:end]
    if end < len(history.events):  # the request that failed
        yield HistoryEvent("alloc", 0, history.events[end].size_bytes, stream=history.events[end].stream)


def _replay(trace: Trace, history: History, setting: str, enough: int, most: int | None) -> Help:
    config = _config(history, setting)
    replay = replay_trace(trace, MemoryLimits(enough, total_bytes=enough, config=config))
    if replay.outcome is not Outcome.DOES_NOT_FIT:
        times = "1 retry" if replay.retries == 1 else f"{replay.retries:,} retries"
        retries = f", after {times}" if replay.retries else ""
        return Help(setting, True, replay.peak_reserved_bytes, f"the same requests are served{retries}")
    if most != enough:
        again = replay_trace(trace, MemoryLimits(most, total_bytes=most or enough, config=config))
        if again.outcome is not Outcome.DOES_NOT_FIT:
            between = f"whether the GPU had the {size_text(again.peak_reserved_bytes)} is not recorded"
            return Help(setting, None, again.peak_reserved_bytes, between)
    need = replay_trace(trace, MemoryLimits(config=config))
    return Help(setting, False, need.peak_reserved_bytes, "the same requests need more than the GPU had")


def _config(history: History, setting: str = "") -> AllocatorConfig:
    """Return the allocator options of a history with `setting` in place of the history's value."""
    own = [part for part in history.alloc_conf.split(",") if part and part.partition(":")[0] not in setting]
    return parse_alloc_conf(",".join(filter(None, [*own, setting])), config_of_torch(history.torch))
