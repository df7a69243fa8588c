"""Any batch size from two traces: every size becomes `fixed_bytes + per_sample_bytes * batch`.

Two traces of one job are aligned event by event. Where they do not align, or a size is no straight line
through whole bytes, the answer is a sentence that says where, and the caller traces each batch size by
itself.

Scratch memory that kernels take and give back need not follow a line: how a kernel splits its work, and
whether it takes any scratch at all, changes with the batch in steps. Where it does not, the affine trace has
it as it was at the batch size that was traced last, and is refitted at the answer.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from planner.program.events import Alloc, Category, Event, Free, PhaseStart, Site, Trace

Slot = Sequence[Alloc | Free]  # scratch that is taken or given back between two other events
Slots = list[Slot]


@dataclass(frozen=True, slots=True)
class _Parted:
    """A trace without its passing scratch, and the scratch that stood before each of the events left."""

    events: list[Event]
    slots: list[Slot]  # one more than events


Line = Callable[[Alloc, Alloc, int, int], Alloc | str]  # through a block at two batch sizes; or its flaw


def align(first: Trace, second: Trace, *, scratch_line: Line | None = None) -> Trace | str:
    """One affine trace through two taken at different batch sizes, or why there is none.

    `scratch_line` makes the lines of passing scratch; by default they go through whole bytes as all others.

    A size that shrinks with the batch, or would be negative at batch 1, lies on no line that holds for every
    batch size. Raises ValueError for traces that are affine already or were taken at one batch size.
    """
    (low,), (high,) = first.batches, second.batches
    if low == high:
        raise ValueError(f"both traces were taken at batch {low}")
    one, other = _part(first), _part(second)
    difference = _first_difference(first, one.events, second, other.events)
    if difference:
        return difference
    events: list[Event] = []
    for index, (a, b) in enumerate(zip(one.events, other.events, strict=True)):
        if isinstance(a, Alloc) and isinstance(b, Alloc):
            line = _line(a, b, low, high)
            if isinstance(line, str):
                return (
                    f"event {index}: block {a.block} ({_where(first, a)}) takes {a.fixed_bytes} bytes "
                    f"at batch {low} and {b.fixed_bytes} at batch {high}: {line}"
                )
            events.append(line)
        else:
            events.append(a)
    sites = _joined_sites(first, second)
    theirs = _moved(other.slots, second, sites)
    make_line = scratch_line or _line
    slots = _choose(one.slots, theirs, lambda ours, new: _lines(ours, new, low, high, make_line))
    merged = _merge(events, slots)
    return replace(first, events=merged, sites=sites, batches=(low, high), details=(), asked=())


def refit(affine: Trace, taken: Trace) -> Trace | str:
    """The affine trace with the scratch memory of `taken`, at whose batch size it holds now as well; or where
    the two differ in anything else. The same events come back where the scratch was as the line said.
    """
    (batch,) = taken.batches
    one, other = _part(affine), _part(taken)
    difference = _first_difference(affine, one.events, taken, other.events)
    if difference:
        return difference
    for index, (a, b) in enumerate(zip(one.events, other.events, strict=True)):
        if isinstance(a, Alloc) and isinstance(b, Alloc):
            expected_bytes = a.bytes_at(batch)
            if expected_bytes != b.fixed_bytes:
                return (
                    f"event {index}: block {a.block} ({_where(affine, a)}) takes {b.fixed_bytes} bytes at "
                    f"batch {batch}, not {expected_bytes} as the line through {_batches(affine)} says"
                )
    sites = _joined_sites(affine, taken)
    theirs = _moved(other.slots, taken, sites)
    slots = _choose(one.slots, theirs, lambda ours, new: _same(ours, new, batch))
    events = _merge(one.events, slots)
    batches = affine.batches if batch in affine.batches else (*affine.batches, batch)
    return replace(affine, events=events, sites=sites, batches=batches)


def _part(trace: Trace) -> _Parted:
    given_back = {event.block for event in trace.events if isinstance(event, Free)}
    scratch: set[int] = set()
    events: list[Event] = []
    slots: list[list[Alloc | Free]] = [[]]
    for event in trace.events:
        if isinstance(event, Alloc) and event.role is Category.WORKSPACE and event.block in given_back:
            scratch.add(event.block)
            slots[-1].append(event)
        elif isinstance(event, Free) and event.block in scratch:
            slots[-1].append(event)
        else:
            events.append(event)
            slots.append([])
    return _Parted(events, list(slots))


def _line(a: Alloc, b: Alloc, low: int, high: int) -> Alloc | str:
    """The block's size as a line through two batch sizes, or the flaw of that line."""
    slope, rest = divmod(b.fixed_bytes - a.fixed_bytes, high - low)
    fixed_bytes = a.fixed_bytes - slope * low
    if rest:
        return "no whole number of bytes per sample"
    if slope < 0 or fixed_bytes + slope < 0:
        return "no line that holds for every batch"
    return Alloc(a.block, fixed_bytes, slope, a.role, a.site, a.optional)


def rounded_line(a: Alloc, b: Alloc, low: int, high: int) -> Alloc | str:
    """The line with whole bytes per sample that meets the second block and passes nearest to the first.

    What a library takes may have a part that changes by a few bytes from batch size to batch size.
    """
    slope = round((b.fixed_bytes - a.fixed_bytes) / (high - low))
    fixed_bytes = b.fixed_bytes - slope * high
    if slope < 0 or fixed_bytes + slope < 0:
        return "no line that holds for every batch"
    return Alloc(a.block, fixed_bytes, slope, a.role, a.site, a.optional)


def _choose(
    ours: Sequence[Slot],
    theirs: Sequence[Slot],
    join: Callable[[Sequence[Slot], Sequence[Slot]], Slots | None],
) -> list[Slot]:
    """For each group of slots what `join` makes of both, or else theirs under names that are new."""
    chosen: list[Slot] = []
    for start, end in _groups(ours, theirs):
        joined = join(ours[start:end], theirs[start:end])
        chosen += [_renamed(slot) for slot in theirs[start:end]] if joined is None else joined
    return chosen


def _groups(ours: Sequence[Slot], theirs: Sequence[Slot]) -> Iterator[tuple[int, int]]:
    """Ranges of slots at whose ends all scratch is given back, in either trace."""
    start = held = 0
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True), 1):
        held += sum(1 if isinstance(event, Alloc) else -1 for event in (*a, *b))
        if held == 0:
            yield start, index
            start = index


def _renamed(slot: Slot) -> Slot:
    """Names below zero stand for new ones until all names are known."""
    return [
        replace(event, block=-1 - event.block) if isinstance(event, Alloc) else Free(-1 - event.block)
        for event in slot
    ]


def _lines(
    ours: Sequence[Slot], theirs: Sequence[Slot], low: int, high: int, make_line: Line
) -> Slots | None:
    """The scratch of both as lines; None where it is not alike, or on no line."""

    def join(a: Alloc, b: Alloc) -> Alloc | None:
        line = make_line(a, b, low, high)
        return None if isinstance(line, str) else line

    return _paired(ours, theirs, join)


def _same(ours: Sequence[Slot], theirs: Sequence[Slot], batch: int) -> Slots | None:
    """Our scratch where theirs, taken at this batch size, is the same; else None."""

    def join(a: Alloc, b: Alloc) -> Alloc | None:
        return a if a.bytes_at(batch) == b.fixed_bytes else None

    return _paired(ours, theirs, join)


def _is_like(one: Alloc, other: Alloc) -> bool:
    return (one.site, one.optional) == (other.site, other.optional)


def _paired(
    ours: Sequence[Slot], theirs: Sequence[Slot], join: Callable[[Alloc, Alloc], Alloc | None]
) -> Slots | None:
    """Our slots with each block joined to its twin; None where one has none or cannot be joined."""
    twins: dict[int, int] = {}
    slots: Slots = []
    for a, b in zip(ours, theirs, strict=True):
        if len(a) != len(b):
            return None
        slot: list[Alloc | Free] = []
        for event, twin in zip(a, b, strict=True):
            joined: Alloc | Free | None = None
            if isinstance(event, Alloc) and isinstance(twin, Alloc) and _is_like(event, twin):
                twins[event.block] = twin.block
                joined = join(event, twin)
            elif isinstance(event, Free) and isinstance(twin, Free) and twins[event.block] == twin.block:
                joined = event
            if joined is None:
                return None
            slot.append(joined)
        slots.append(slot)
    return slots


def _joined_sites(one: Trace, other: Trace) -> tuple[Site, ...]:
    known = set(one.sites)
    return (*one.sites, *(site for site in other.sites if site not in known))


def _moved(slots: Sequence[Slot], trace: Trace, sites: tuple[Site, ...]) -> list[Slot]:
    """The slots of a trace with their sites counted in `sites`."""
    if trace.sites == sites:
        return list(slots)
    places = {site: index for index, site in enumerate(sites)}
    return [
        [
            replace(event, site=places[trace.sites[event.site]]) if isinstance(event, Alloc) else event
            for event in slot
        ]
        for slot in slots
    ]


def _merge(events: Sequence[Event], slots: Sequence[Slot]) -> tuple[Event, ...]:
    """Events and the scratch between them; names below zero become names that nobody else has."""
    merged: list[Event] = list(slots[0])
    for event, slot in zip(events, slots[1:], strict=True):
        merged.append(event)
        merged.extend(slot)
    free = max((event.block for event in merged if isinstance(event, Alloc)), default=-1) + 1
    names: dict[int, int] = {}
    for index, event in enumerate(merged):
        if isinstance(event, PhaseStart) or event.block >= 0:
            continue
        name = names.setdefault(event.block, free + len(names))
        merged[index] = replace(event, block=name)
    return tuple(merged)


def _first_difference(one: Trace, ones: Sequence[Event], other: Trace, others: Sequence[Event]) -> str:
    """Where two traces of a job part ways, apart from sizes and passing scratch; "" where they do not."""
    twins: dict[int, int] = {}
    for index, (a, b) in enumerate(zip(ones, others, strict=False)):
        if isinstance(a, Alloc) and isinstance(b, Alloc):
            same = a.role == b.role and one.sites[a.site] == other.sites[b.site]
            twins[a.block] = b.block
        elif isinstance(a, Free) and isinstance(b, Free):
            same = twins.get(a.block) == b.block
        else:
            same = a == b and isinstance(a, PhaseStart)
        if not same:
            return (
                f"event {index} is {_describe(one, a)} at {_batches(one)} and {_describe(other, b)} at "
                f"{_batches(other)}"
            )
    if len(ones) == len(others):
        return ""
    (short, _), (long, events) = sorted(((one, ones), (other, others)), key=lambda pair: len(pair[1]))
    index = min(len(ones), len(others))
    extra = _describe(long, events[index])
    return f"event {index} at {_batches(long)} is {extra}; the trace at {_batches(short)} has ended before it"


def _describe(trace: Trace, event: Event) -> str:
    if isinstance(event, Alloc):
        return f"{_where(trace, event)} taking block {event.block} for {event.role}"
    if isinstance(event, Free):
        born = next(
            entry for entry in trace.events if isinstance(entry, Alloc) and entry.block == event.block
        )
        return f"block {event.block} of {_where(trace, born)} given back"
    return f"the mark of step {event.step}, {event.phase}"


def _where(trace: Trace, event: Alloc) -> str:
    site = trace.sites[event.site]
    return f"{site.op} in {site.module or 'the loop'}"


def _batches(trace: Trace) -> str:
    numbers = [str(batch) for batch in trace.batches]
    return f"batch {numbers[0]}" if len(numbers) == 1 else f"batches {' and '.join(numbers)}"
