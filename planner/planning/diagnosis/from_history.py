"""Diagnose a recorded history of the allocator, also by replaying its requests under other settings."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from planner.allocator import AllocatorConfig, MemoryLimits, config_of_torch, parse_alloc_conf, replay_trace
from planner.allocator.history import History, HistoryEvent, check_history, to_events
from planner.planning.diagnosis.diagnosis import (
    Cause,
    Diagnosis,
    Held,
    Help,
    Place,
    retries_text,
    size_text,
)
from planner.planning.diagnosis.from_frames import names_evaluation
from planner.planning.diagnosis.on_gpus import gpus_serving
from planner.program import Category, Outcome, Site, Trace

_MOST_HELD = 12
_OLDER = "in use before the recording began"
_LEAST_RISES = 4  # rises of the level to which memory falls back; fewer rises are not called growth
SETTINGS = (
    *("expandable_segments:True", "max_split_size_mb:128", "garbage_collection_threshold:0.8"),
    "max_split_size_mb:128,garbage_collection_threshold:0.8",
)


class _Growth(NamedTuple):
    """A rise of the levels to which memory in use falls back, and the code that holds most of it."""

    floors: Sequence[int]  # levels in ascending order
    place: Place
    share_bytes: int  # growth of that code's blocks in the history's second half

    @property
    def text(self) -> str:
        """Return the growth as text."""
        return (
            f"the level to which memory in use falls rose {len(self.floors) - 1} times, by "
            f"{size_text(self.floors[-1] - self.floors[0])} in all; {size_text(self.share_bytes)} in the "
            "history's second half by one line"
        )


def diagnose_history(history: History, source: str) -> Diagnosis:
    """Diagnose the last out-of-memory error of a history, or describe the peak if there is no error.

    Without events only the blocks in use are described. Raises UsageError if the allocator options of the
    history are not simulated.
    """
    ends = [at for at, event in enumerate(history.events) if event.action == "oom"]
    levels, reserved_levels = _levels(history), _reserved(history)
    check, notes = check_history(history), tuple(history.notes)
    if ends:
        end = at = ends[-1]  # of the requests, and of the blocks in use
        reserved, requested = reserved_levels[at], history.events[end].size_bytes
        if len(ends) > 1:
            notes = (f"the history has {len(ends)} out-of-memory errors; this is the last", *notes)
    else:
        end, at = len(history.events), max(range(len(levels)), key=levels.__getitem__)
        reserved, requested = max(reserved_levels), None
    trace = Trace(tuple(to_events(_requests(history, end))), history.sites, 1)
    helps = _replays(trace, history, end, reserved, check.refused_bytes) if history.events else ()
    growth, site = _growth(history, end, levels), Site("", "")
    if ends:
        site = _site(history, history.events[end])
        cause, reason = _cause(site, history.events[end].size_bytes, levels[at], reserved, growth, helps)
        if cause is Cause.TOO_LARGE and _is_first_step(history, end):
            cause, reason = (
                Cause.FIRST_STEP,
                f"{reason}; it happened in the optimizer's first step, which allocates its state",
            )
        if cause is not Cause.EVALUATION and names_evaluation(site.op):
            notes = (_evaluation_text(site), *notes)
    else:
        cause, reason = _no_failure(history, levels, growth, check.retries)
    live, older = _live_events(history, at), tuple(_older(history, at))
    parts, explained = _by_category(history, live, older)
    return Diagnosis(
        source,
        cause,
        reason,
        requested,
        levels[at],
        reserved,
        history.total_bytes,
        Place(_name(site)),
        _by_code(history, live, older),
        parts,
        helps,
        (*explained, *notes),
        gpus_serving(trace, _config(history)) if history.events else None,
        grown_by=Place() if growth is None else growth.place,
    )


def _no_failure(
    history: History, levels: Sequence[int], growth: _Growth | None, retries: int
) -> tuple[Cause, str]:
    """Return the cause and the reason of a history without a failed request."""
    if not history.events:
        return Cause.UNKNOWN, (
            "the snapshot has no history, only the blocks of one moment: diagnose the log with the error's "
            "message, or record a history by planner.watch(record=True)"
        )
    reason = "what was in use at the peak is below"
    if retries:
        requests = "1 request was" if retries == 1 else f"{retries:,} requests were"
        reason = f"{requests} served only after cached memory was released; {reason}"
    if growth is not None:
        reason = f"{growth.text}{_end_text(growth.floors, max(levels), history.total_bytes)}; {reason}"
    return Cause.NO_FAILURE, reason


def _cause(
    site: Site, asked: int, allocated: int, reserved: int, growth: _Growth | None, helps: Sequence[Help]
) -> tuple[Cause, str]:
    """Return the cause of a failed request and its explanation."""
    if asked > allocated:
        together = f"all blocks in use together took {size_text(allocated)}"
        return Cause.ONE_REQUEST, f"{size_text(asked)} were asked for at once; {together}"
    if growth is not None and growth.floors[-1] - growth.floors[0] >= asked:
        return Cause.GROWTH, growth.text
    unused = f"{size_text(reserved - allocated)} were reserved and unused"
    is_in_pieces = reserved - allocated >= asked
    is_helped = any(one.fits is not False for one in helps)
    if is_in_pieces and is_helped:
        return Cause.FRAGMENTATION, f"{unused}, more than the {size_text(asked)} asked for, but in pieces"
    if names_evaluation(site.op):
        return Cause.EVALUATION, _evaluation_text(site)
    reason = f"blocks in use took {size_text(allocated)}, and {size_text(asked)} more were asked for"
    if is_in_pieces:
        reason = f"{reason}; {unused}, in pieces, and none of the settings below would have joined enough"
    return Cause.TOO_LARGE, reason


def _is_first_step(history: History, end: int) -> bool:
    """Return whether the failed request is from the first step of an optimizer.

    It is if an optimizer made the request, and no module has run since an optimizer first allocated. Returns
    False if blocks were in use before the history began, since earlier steps may have allocated them.
    """
    if not history.categories or any(block.in_use for state in history.start for block in state.blocks):
        return False
    asked = (event.site for event in history.events[: end + 1] if event.action in ("alloc", "oom"))
    categories = [history.categories[site] for site in asked if site >= 0]
    if not categories or categories[-1] is not Category.OPTIMIZER:
        return False
    return Category.ACTIVATION not in categories[categories.index(Category.OPTIMIZER) :]


def _evaluation_text(site: Site) -> str:
    return f"it happened in {site.op}, an evaluation"


def _end_text(floors: Sequence[int], peak_bytes: int, total_bytes: int | None) -> str:
    """Return text on how many more rises exhaust memory, or "" if no total above the peak is known."""
    if total_bytes is None or total_bytes <= peak_bytes:
        return ""
    more = (total_bytes - peak_bytes) * (len(floors) - 1) // (floors[-1] - floors[0])
    return f", so that the GPU's {size_text(total_bytes)} end after {more:,} more at the latest"


def _levels(history: History) -> list[int]:
    """Return the allocated bytes before each event of a history, and after the last event."""
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
    """Return the reserved bytes before each event of a history, and after the last event."""
    signs = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
    level = sum(state.size_bytes for state in history.start)
    levels = [level]
    for event in history.events:
        level += signs.get(event.action, 0) * event.size_bytes
        levels.append(level)
    return levels


def _by_code(history: History, live: Iterable[HistoryEvent], older: Iterable[int]) -> tuple[Held, ...]:
    """Return the `_MOST_HELD` largest groups of blocks in use, grouped by the code that allocated them."""
    groups: dict[str, list[int]] = defaultdict(list)
    for event in live:
        name = _name(_site(history, event))
        groups[name or f"no line of Python, {size_text(event.size_bytes)} each"].append(event.size_bytes)
    for size_bytes in older:
        name = _OLDER if history.events else f"blocks of {size_text(size_bytes)}"
        groups[name].append(size_bytes)
    return _held(groups)[:_MOST_HELD]


def _by_category(
    history: History, live: Iterable[HistoryEvent], older: Sequence[int]
) -> tuple[tuple[Held, ...], tuple[str, ...]]:
    """Return `Held` groups of the blocks in use by category, and notes that explain the categories.

    Both are empty if no stack of functions was recorded.
    """
    if not any(history.categories):
        return (), ()
    groups: dict[str, list[int]] = defaultdict(list)
    is_guessed = False
    for event in live:
        category = history.categories[event.site] if event.site >= 0 else None
        if category is None and not _site(history, event).module:
            category, is_guessed = Category.GRADIENT, True
        groups[category.value if category else "other"].append(event.size_bytes)
    if older:
        groups[_OLDER] = [*older]
    notes = [
        "by category, gradients are all blocks of the backward pass, activations all of a module's forward"
    ]
    if is_guessed:
        notes.append(
            "blocks without a function of Python are counted as gradients: autograd's threads run none"
        )
    return _held(groups), tuple(notes)


def _held(groups: Mapping[str, Sequence[int]]) -> tuple[Held, ...]:
    """Convert block sizes by group to `Held` groups, the largest total size first."""
    held = (Held(name, sum(sizes), len(sizes)) for name, sizes in groups.items())
    return tuple(sorted(held, key=_by_size))


def _by_size(held: Held) -> tuple[int, str]:
    return -held.size_bytes, held.what


def _older(history: History, end: int) -> Iterator[int]:
    """Yield the sizes of blocks that precede the recording and are still in use before event `end`."""
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


def _name(site: Site) -> str:
    return " in ".join(filter(None, (site.module, site.op)))


def _floors(levels: Sequence[int]) -> list[int]:
    """Return the rising levels to which memory in use falls back, or [] if the levels rise too few times.

    Memory never falls below one of the levels again. They are in ascending order. A fall counts if it is at
    least half of the largest fall. The result is the longest run of last levels in which no level exceeds the
    previous level by more than memory falls to it: a training step frees the blocks that it allocates, and
    the layers of a forward pass do not. The levels have to rise at least `_LEAST_RISES` times.
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
    """Yield the lowest level and the size of each fall of `least` or more that a rise of `least` follows."""
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


def _growth(history: History, end: int, levels: Sequence[int]) -> _Growth | None:
    """Return the growth of memory before an event and the code that grew most, or None if there is none.

    The code is decided by the live blocks of the history's second half. Parameters are no growth: a model is
    loaded layer by layer.
    """
    floors = _floors(levels[: end + 1])
    if not floors:
        return None
    changes: dict[tuple[Site, Category | None], int] = defaultdict(int)
    for sign, at in ((-1, end // 2), (1, end)):
        for event in _live_events(history, at):
            category = history.categories[event.site] if history.categories and event.site >= 0 else None
            changes[_site(history, event), category] += sign * event.size_bytes
    (site, category), grown = max(changes.items(), key=_by_growth, default=((Site("", ""), None), 0))
    return None if category is Category.PARAMETER else _Growth(floors, Place(_name(site)), max(0, grown))


def _by_growth(item: tuple[tuple[Site, Category | None], int]) -> tuple[int, str]:
    return item[1], item[0][0].module


def _replays(
    trace: Trace, history: History, end: int, reserved: int, refused: int | None
) -> tuple[Help, ...]:
    """Replay the requests of a history under each of `SETTINGS`, and return whether each serves them.

    The requests up to event `end` are replayed. The GPU had at least the reserved memory, plus the memory
    that was free if a request failed. It had less than `refused`, the level of reserved memory that it
    refused, and no more than its total.
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
        retries = f", after {retries_text(replay.retries)}" if replay.retries else ""
        return Help(setting, True, replay.peak_reserved_bytes, f"the same requests are served{retries}")
    if most != enough:
        again = replay_trace(trace, MemoryLimits(most, total_bytes=most or enough, config=config))
        if again.outcome is not Outcome.DOES_NOT_FIT:
            between = f"whether the GPU had the {size_text(again.peak_reserved_bytes)} is not recorded"
            return Help(setting, None, again.peak_reserved_bytes, between)
    need = replay_trace(trace, MemoryLimits(config=config))
    return Help(setting, False, need.peak_reserved_bytes, "the same requests need more than the GPU had")


def _config(history: History, setting: str = "") -> AllocatorConfig:
    """Return the allocator configuration of a history, with the options of `setting` applied.

    The options of `setting` override recorded options, since of two options of one name the last counts.
    """
    texts = filter(None, (history.alloc_conf.rstrip(","), setting))
    return parse_alloc_conf(",".join(texts), config_of_torch(history.torch))
