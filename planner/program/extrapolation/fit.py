"""Fit programs for any batch size to traces of one job at different batch sizes."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice

from msgspec import Struct
from msgspec.structs import replace

from planner.program.diff import first_divergence, match_events
from planner.program.events import Alloc, Category, Event, Free, PhaseStart, Site, Trace
from planner.program.program import AffineAlloc, Program, ProgramEvent, constant_alloc


class NotAffineError(Exception):
    """The error of traces that no single program fits. The message names the event at which they diverge."""


class SizesNotAffineError(NotAffineError):
    """The error of traces with equal events, whose sizes no affine or quadratic formula fits."""


class Affine(Struct, frozen=True):
    """An integer of the form `fixed + slope * batch`."""

    fixed: int
    slope: int


def affine_through(a: int, b: int, low: int, high: int) -> Affine:
    """Return the affine integer that is `a` at batch `low` and `b` at batch `high`.

    Raises SizesNotAffineError if the slope is not an integer.
    """
    slope, rest = divmod(b - a, high - low)
    if rest:
        raise SizesNotAffineError(f"{a} at batch {low} and {b} at batch {high}: no whole number per sample")
    return Affine(a - slope * low, slope)


def rounded_affine(a: int, b: int, low: int, high: int) -> Affine:
    """Return the affine integer that is `b` at batch `high` and closest to `a` at batch `low`.

    Fits workspaces of libraries, part of which may vary by a few bytes with the batch size.
    """
    slope = round((b - a) / (high - low))
    return Affine(b - slope * high, slope)


def nearest_affine(a: int, b: int, low: int, high: int) -> Affine:
    """Return the nondecreasing affine integer that is `b` at batch `high` and close to `a` at `low`.

    It is positive at every batch size. Fits estimates between the batch sizes of runs whose sizes are not
    exactly affine.
    """
    size = rounded_affine(a, b, low, high)
    if size.slope >= 0 and size.fixed + size.slope > 0:
        return size
    slope = 0 if size.slope < 0 else (b - 1) // high
    return Affine(b - slope * high, slope)


class Quadratic(Struct, frozen=True):
    """An integer of the form `fixed + slope * batch + square * batch ** 2`."""

    fixed: int
    slope: int
    square: int


def polynomial_through(values: Sequence[int], batches: Sequence[int]) -> Affine | Quadratic:
    """Return the polynomial in the batch size through two or three values.

    Three values must be at consecutive batch sizes. Raises SizesNotAffineError if a coefficient is not an
    integer.
    """
    if len(values) == 2:
        return affine_through(values[0], values[1], batches[0], batches[1])
    (a, b, c), low = values, batches[0]
    square, rest = divmod(c - 2 * b + a, 2)
    if rest:
        raise SizesNotAffineError(f"{a}, {b} and {c} at batches {low} to {low + 2}: no whole number per pair")
    if not square:
        return affine_through(a, b, low, low + 1)
    slope = b - a - square * (2 * low + 1)
    return Quadratic(a - (slope + square * low) * low, slope, square)


FitSize = Callable[[int, int, int, int], Affine]


def fit_events(
    first: Trace, ones: Sequence[Event], second: Trace, others: Sequence[Event], fit: FitSize = affine_through
) -> list[ProgramEvent]:
    """Return the events of two traces, paired in order, with sizes that are affine in the batch size.

    Block and site numbers are those of the first trace. Raises NotAffineError.
    """
    events: list[ProgramEvent] = []
    for index, (a, b, is_same) in enumerate(match_events(first, ones, second, others)):
        if not is_same:
            at_first = f"{_describe(first, a)} at batch {first.batch}"
            raise NotAffineError(
                f"event {index} is {at_first} and {_describe(second, b)} at batch {second.batch}"
            )
        if isinstance(a, Alloc) and isinstance(b, Alloc):
            events.append(_fit_alloc(a, b, first, second, fit))
        elif not isinstance(a, Alloc):
            events.append(a)
    if len(ones) != len(others):
        _raise_longer(first, ones, second, others)
    return events


def fit_quadratic_events(traces: Sequence[Trace], events: Sequence[Sequence[Event]]) -> list[ProgramEvent]:
    """Return the events of three traces at consecutive batch sizes, with sizes of degree two or less.

    Block and site numbers are those of the first trace. Raises NotAffineError.
    """
    batches = [trace.batch for trace in traces]
    fit_events(traces[1], events[1], traces[2], events[2], _any_size)  # the same apart from sizes
    fitted: list[ProgramEvent] = []
    for event, *others in zip(
        fit_events(traces[0], events[0], traces[1], events[1], _any_size), *events, strict=True
    ):
        if not isinstance(event, AffineAlloc):
            fitted.append(event)
            continue
        size = polynomial_through([one.size_bytes for one in others if isinstance(one, Alloc)], batches)
        square = size.square if isinstance(size, Quadratic) else 0
        alloc = replace(event, fixed_bytes=size.fixed, bytes_per_sample=size.slope, bytes_per_pair=square)
        if square < 0 or alloc.size_at(2) < alloc.size_at(1) or alloc.size_at(1) < 0:
            raise SizesNotAffineError(f"block {alloc.block} shrinks at some batch size")
        fitted.append(alloc)
    return fitted


def _any_size(a: int, b: int, low: int, high: int) -> Affine:
    return Affine(0, 0)


def _fit_alloc(a: Alloc, b: Alloc, first: Trace, second: Trace, fit: FitSize) -> AffineAlloc:
    try:
        size = fit(a.size_bytes, b.size_bytes, first.batch, second.batch)
        if size.slope < 0 or size.fixed + size.slope < 0:
            raise SizesNotAffineError(
                f"{a.size_bytes} bytes at batch {first.batch} and {b.size_bytes} at batch {second.batch}: "
                "no affine size for every batch"
            )
    except SizesNotAffineError as error:
        raise SizesNotAffineError(f"block {a.block} ({_where(first, a)}): {error}") from error
    return AffineAlloc(a.block, size.fixed, size.slope, a.category, a.site, a.may_fail, a.stream)


def _raise_longer(first: Trace, ones: Sequence[Event], second: Trace, others: Sequence[Event]) -> None:
    (short, _), (long, events) = sorted(((first, ones), (second, others)), key=lambda pair: len(pair[1]))
    index = min(len(ones), len(others))
    raise NotAffineError(
        f"event {index} at batch {long.batch} is {_describe(long, events[index])}; "
        f"the trace at batch {short.batch} has ended before it"
    )


def _describe(trace: Trace, event: Event) -> str:
    if isinstance(event, Alloc):
        return f"{_where(trace, event)} allocating block {event.block} for {event.category}"
    if isinstance(event, Free):
        allocs = (one for one in trace.events if isinstance(one, Alloc) and one.block == event.block)
        return f"block {event.block} of {_where(trace, next(allocs))} freed"
    return f"the start of step {event.step}, {event.phase}"


def _where(trace: Trace, event: Alloc) -> str:
    site = trace.sites[event.site]
    return f"{site.op} in {site.module or 'the loop'}"


def fit_pinned(first: Trace, second: Trace) -> tuple[tuple[int, int], ...]:
    """Return (fixed bytes, bytes per sample) of each pinned host block, fitted to two traces.

    Raises NotAffineError.
    """
    if len(first.pinned) != len(second.pinned):
        raise NotAffineError(f"{len(first.pinned)} and {len(second.pinned)} blocks of pinned memory")
    lines = [
        affine_through(a, b, first.batch, second.batch)
        for a, b in zip(first.pinned, second.pinned, strict=True)
    ]
    return tuple((line.fixed, line.slope) for line in lines)


# ---- two whole traces, whose kernel calls are not known

_OF_BATCH = (Category.INPUT, Category.ACTIVATION, Category.TEMPORARY)
Slot = Sequence[Alloc | Free]  # events that allocate or free workspaces between two other events


def fit_traces(
    first: Trace, second: Trace, workspace_fit: FitSize = affine_through, tensor_fit: FitSize = affine_through
) -> Program:
    """Fit a program without kernel calls to two traces.

    Workspaces are affine in the batch size if possible. If the workspaces in a range of events differ in more
    than sizes, or `workspace_fit` does not fit the sizes, the second trace's workspaces in this range are
    used as constants. Raises NotAffineError, and ValueError for traces of one batch size.
    """
    if first.batch == second.batch:
        raise ValueError(f"both traces are of batch {first.batch}")
    ones, our_slots = _without_workspaces(first)
    others, their_slots = _without_workspaces(second)
    events = fit_events(first, ones, second, others, tensor_fit)
    existing = set(first.sites)
    sites = (*first.sites, *(site for site in second.sites if site not in existing))
    places = {site: index for index, site in enumerate(sites)}
    free = 1 + max((event.block for event in first.events if isinstance(event, Alloc)), default=-1)
    names: dict[int, int] = {}  # number in the program by block of the second trace

    def constant(event: Alloc | Free) -> ProgramEvent:
        name = names.setdefault(event.block, free + len(names))
        if isinstance(event, Free):
            return replace(event, block=name)
        return constant_alloc(event, name, places[second.sites[event.site]])

    slots: list[list[ProgramEvent]] = []
    for start, end in _groups(our_slots, their_slots):
        theirs = their_slots[start:end]
        fitted = _fit_slots(our_slots[start:end], theirs, first, second, workspace_fit)
        slots += fitted or [[constant(event) for event in slot] for slot in theirs]
        if fitted:
            names |= _same_blocks(chain(*our_slots[start:end]), chain(*theirs))
    merged = [*slots[0]]
    for event, slot in zip(events, slots[1:], strict=True):
        merged += [event, *slot]
    notes, unknown_ops, growth = first.notes, first.unknown_ops, first.growth_sources
    pinned = fit_pinned(first, second)
    rows = (row for row in second.conv_workspaces if row.block in names)
    convolutions = sorted((replace(row, block=names[row.block]) for row in rows), key=lambda row: row.block)
    return Program(
        tuple(merged), sites, unknown_ops=unknown_ops, notes=notes, growth_sources=growth, pinned=pinned,
        conv_workspaces=tuple(convolutions), facts=first.facts,
    )  # fmt: skip


def _same_blocks(ours: Iterable[Event], theirs: Iterable[Event]) -> dict[int, int]:
    """Return a map from the blocks of `theirs` to the corresponding blocks of `ours`."""
    pairs = zip(ours, theirs, strict=True)
    return {b.block: a.block for a, b in pairs if isinstance(a, Alloc) and isinstance(b, Alloc)}


def scaled_program(trace: Trace) -> Program:
    """Estimate a program from one trace by scaling inputs, activations and temporaries with the batch.

    Their sizes grow in proportion to the batch size, except blocks of at most one byte per sample. Blocks of
    all other categories are constant.
    """

    def scaled(event: Event) -> ProgramEvent:
        if not isinstance(event, Alloc):
            return event
        alloc = constant_alloc(event, event.block, event.site)
        if event.category not in _OF_BATCH or event.size_bytes <= trace.batch:
            return alloc
        slope = (event.size_bytes - 1) // trace.batch
        return replace(alloc, fixed_bytes=event.size_bytes - slope * trace.batch, bytes_per_sample=slope)

    return Program(tuple(map(scaled, trace.events)), trace.sites, conv_workspaces=trace.conv_workspaces)


def fit_by_site(trace: Trace, other: Trace) -> Program:
    """Estimate a program from two traces whose events differ, by pairing their blocks site by site.

    A loop over the samples makes such traces. The program has the events of `trace`. Blocks that both traces
    allocate at a site in a phase are paired in order, or in descending order of size if their counts differ,
    since blocks of a single sample are small. Sizes of paired blocks are affine through both traces; other
    sizes are constant.
    """
    counterparts = _blocks_by_site(other)
    sizes: dict[int, int] = {}
    for place, blocks in _blocks_by_site(trace).items():
        pairs = [blocks, counterparts.get(place, [])]
        if len(blocks) != len(pairs[1]):
            pairs = [sorted(one, key=lambda block: -block.size_bytes) for one in pairs]
        sizes.update((ours.block, its.size_bytes) for ours, its in zip(*pairs, strict=False))

    def fitted(event: Event) -> ProgramEvent:
        if not isinstance(event, Alloc):
            return event
        alloc = constant_alloc(event, event.block, event.site)
        size = nearest_affine(
            sizes.get(event.block, event.size_bytes), event.size_bytes, other.batch, trace.batch
        )
        return replace(alloc, fixed_bytes=size.fixed, bytes_per_sample=size.slope)

    return Program(tuple(map(fitted, trace.events)), trace.sites, conv_workspaces=trace.conv_workspaces)


def _blocks_by_site(trace: Trace) -> dict[tuple[PhaseStart | None, Site], list[Alloc]]:
    """Return the allocations of a trace by phase and site. Each list is in order of allocation."""
    found: dict[tuple[PhaseStart | None, Site], list[Alloc]] = {}
    phase = None
    for event in trace.events:
        if isinstance(event, PhaseStart):
            phase = event
        elif isinstance(event, Alloc):
            found.setdefault((phase, trace.sites[event.site]), []).append(event)
    return found


def tensors_diverge(program: Program, trace: Trace) -> bool:
    """Return whether a program and a trace differ in more than freed workspaces.

    The program has no kernel calls.
    """
    fitted = program.instantiate(trace.batch)
    ours, theirs = (replace(one, events=tuple(_without_workspaces(one)[0])) for one in (fitted, trace))
    return bool(first_divergence(ours, theirs))


def _without_workspaces(trace: Trace) -> tuple[list[Event], list[list[Alloc | Free]]]:
    """Split a trace into the events of tensors and the events of workspaces that are freed.

    The second list has one slot of workspace events before, between and after the events of the first list.
    """
    freed = {event.block for event in trace.events if isinstance(event, Free)}
    workspaces: set[int] = set()
    events: list[Event] = []
    slots: list[list[Alloc | Free]] = [[]]
    for event in trace.events:
        if isinstance(event, Alloc) and event.category is Category.WORKSPACE and event.block in freed:
            workspaces.add(event.block)
            slots[-1].append(event)
        elif isinstance(event, Free) and event.block in workspaces:
            slots[-1].append(event)
        else:
            events.append(event)
            slots.append([])
    return events, slots


def _groups(ours: Sequence[Slot], theirs: Sequence[Slot]) -> Iterator[tuple[int, int]]:
    """Yield the shortest ranges (start, end) of slots after which neither trace holds a workspace."""
    start = held = 0
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True), 1):
        held += sum(1 if isinstance(event, Alloc) else -1 for event in (*a, *b))
        if held == 0:
            yield start, index
            start = index


def _fit_slots(
    ours: Sequence[Slot], theirs: Sequence[Slot], first: Trace, second: Trace, fit: FitSize
) -> list[list[ProgramEvent]] | None:
    """Return the workspace events of each slot, fitted to two traces, or None if no fit exists.

    No fit exists if the slots differ in more than sizes or `fit` fails.
    """
    lengths = [len(slot) for slot in ours]
    if lengths != [len(slot) for slot in theirs]:
        return None
    try:
        events = fit_events(first, list(chain(*ours)), second, list(chain(*theirs)), fit)
    except NotAffineError:
        return None
    coming = iter(events)
    return [list(islice(coming, length)) for length in lengths]
