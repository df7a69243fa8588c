"""Derive the trace of a deep model from the traces of two shallow models with the same repeated block.

The two traces are compared event by event. The additional events of the deeper trace are the insertions that
one more block adds; a still deeper model repeats each insertion. An insertion may free memory of the
block before it, such as parameters that FSDP gathered for that block; each copy then frees the memory of the
copy before it.
"""

import re
from collections import ChainMap
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from planner.program.events import Alloc, Event, Free, PhaseStart, Site, Trace

BLOCK = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")  # the number of a block in a module's name
SHALLOW = 4  # number of blocks of the shallower model: the first, the last and two between them
CHECKED = 7  # number of blocks of a model that is captured to check an extrapolation

_LOOKAHEAD = 48  # events that must match after an insertion, so that one equal size does not end it
_LARGEST_INSERTION = 4096
_LARGEST_GROWTH = 1 / 3  # as a share of the size, of a tensor with one number per parameter (clip_grad_norm_)
_VOTES = 4  # frees on each side of an insertion that decide its order


class NotRepeatedError(Exception):
    """The error of two traces that do not differ by exactly one repeated block; the message says why."""


class _Insertion(Struct, frozen=True):
    """Consecutive events that one more model block adds; their memory blocks have negative numbers."""

    position: int  # index of the shallower trace's event before which they are inserted
    start: int  # index of the first of these events in the deeper trace
    events: tuple[Event, ...]
    is_reversed: bool  # whether the deepest block's copy comes first, as in a backward pass


class Origin(NamedTuple):
    """The source of an event of an extrapolated trace: an event of the deeper of the two compared traces."""

    event: int  # its index in the deeper trace
    block: int | None  # number of the added block's copy, from 0; None if the event is of another block


class RepeatedBlock(Struct, frozen=True):
    """A trace, with the events and bytes that each further copy of the model's repeated block adds."""

    trace: Trace
    deep: Trace  # the trace of the model with one more block
    layer: re.Pattern[str]  # finds the number of a block in a module's name
    inserted: int  # number of the first added block; equal and higher numbers are increased
    insertions: tuple[_Insertion, ...]
    positions: tuple[int, ...]  # index in the deeper trace of each event of `trace`
    added_bytes: Mapping[int, int]  # by memory block: its growth with each further model block
    successors: Mapping[int, int]  # by memory block that an insertion frees: the inserted block replacing it

    def with_more(self, blocks: int) -> Trace:
        """Return the trace of a model with `blocks` more repeated blocks."""
        return _Repetition(self, blocks).trace() if blocks else self.trace

    def with_sizes_of(self, deep: Trace) -> "RepeatedBlock":
        """Return the repeated block with the sizes of another trace of the deeper model.

        The two deeper traces may differ only in sizes that do not grow with the number of blocks. Raises
        NotRepeatedError if they differ in more.
        """
        ones, others = self.deep.events, deep.events
        if _structure(self.deep) != _structure(deep):
            raise NotRepeatedError("the deeper model has other events in another run")
        if any(ones[k] != others[k] for k in self._indices_of_grown()):
            raise NotRepeatedError("sizes that grow with the number of blocks depend on more than that")
        events = tuple(
            event if ones[index] == others[index] else _with_size(event, others[index])
            for event, index in zip(self.trace.events, self.positions, strict=True)
        )

        def resized(inserted: tuple[Event, ...], start: int) -> tuple[Event, ...]:
            return tuple(map(_with_size, inserted, others[start : start + len(inserted)]))

        insertions = tuple(replace(one, events=resized(one.events, one.start)) for one in self.insertions)
        trace = replace(deep, events=events, sites=self.trace.sites)
        return replace(self, trace=trace, deep=deep, insertions=insertions)

    def _indices_of_grown(self) -> Iterator[int]:
        """Yield the index in the deeper trace of each allocation that grows with the number of blocks."""
        for event, index in zip(self.trace.events, self.positions, strict=True):
            if isinstance(event, Alloc) and event.block in self.added_bytes:
                yield index

    def origins(self, blocks: int) -> list[Origin]:
        """Return, for each event of `with_more(blocks)`, the event of the deeper trace that it repeats.

        `blocks` is positive.
        """
        origins: list[Origin] = []
        for part, copy in self.parts(blocks):
            if isinstance(part, _Insertion):
                origins += (Origin(part.start + k, copy) for k in range(len(part.events)))
            else:
                origins.append(Origin(self.positions[part], None))
        return origins

    def site(self, site: Site, origin: Origin, blocks: int) -> Site:
        """Convert the site of an event of the deeper trace to the site in `with_more(blocks)`."""
        if origin.block is None:
            return _shifted(site, self.layer, self.inserted + 1, blocks - 1)
        return _shifted(site, self.layer, 0, origin.block)

    def parts(self, blocks: int) -> Iterator[tuple[_Insertion | int, int]]:
        """Yield the parts of `with_more(blocks)` in order, each with the number of its copy.

        A part is an insertion, or the index of an event of `trace`, whose copy number is 0.
        """
        inserted: dict[int, list[_Insertion]] = {}
        for one in self.insertions:
            inserted.setdefault(one.position, []).append(one)
        end = len(self.trace.events)
        for index in range(end + 1):
            for one in inserted.get(index, ()):
                numbers = range(blocks)
                for number in reversed(numbers) if one.is_reversed else numbers:
                    yield one, number
            if index < end:
                yield index, 0


def compare_depths(shallow: Trace, deep: Trace, layer: re.Pattern[str] = BLOCK) -> RepeatedBlock:
    """Derive the repeated block of a model from its traces with `SHALLOW` blocks and with one more block.

    `layer` finds the number of a block in a module's name, as its only group. The block in the middle counts
    as the added block, since the first and the last block may differ from the other blocks. Raises
    NotRepeatedError.
    """
    walk = _Walk(shallow, deep, layer, SHALLOW // 2)
    insertions = walk.run()
    return _in_terms_of_shallow(walk, insertions)


class _State(Struct):
    """The correspondence between the memory blocks of two traces; a fork does not change its original."""

    deep_of: MutableMapping[int, int]  # block of the deeper trace by block of the shallower trace
    born: MutableMapping[int, bool]  # blocks of the deeper trace that insertions allocate
    freed: MutableMapping[int, bool]  # blocks of the deeper trace that insertions free
    successors: MutableMapping[int, int]  # by freed block: the inserted block replacing it
    added_bytes: MutableMapping[int, int]  # growth by block of the shallower trace

    def fork(self) -> "_State":
        return _State(*(ChainMap({}, part) for part in (
            self.deep_of, self.born, self.freed, self.successors, self.added_bytes)))  # fmt: skip

    def insert(self, event: Event) -> None:
        if isinstance(event, Alloc):
            self.born[event.block] = True
        elif isinstance(event, Free):
            self.freed[event.block] = True


class _Walk:
    """A comparison of two traces, event by event, that finds the events that the deeper trace inserts."""

    def __init__(self, shallow: Trace, deep: Trace, layer: re.Pattern[str], inserted: int) -> None:
        self.shallow, self.deep = shallow, deep
        self.state = _State({}, {}, {}, {}, {})
        self.layer, self.inserted = layer, inserted
        self._allocs = {event.block: event for event in deep.events if isinstance(event, Alloc)}
        self._names = [_shifted(site, layer, inserted) for site in shallow.sites]
        numbers = [layer.search(site.module) for site in deep.sites]
        self._is_of_inserted = [number is not None and int(number[1]) == inserted for number in numbers]
        self.positions: list[int] = []  # of the deeper trace's counterparts of the shallower trace's events

    def run(self) -> list[tuple[int, int, int]]:
        """Return the position, the start and the end of each insertion.

        The position is the index in the shallower trace of the event that follows the insertion; start and
        end are indices in the deeper trace. Raises NotRepeatedError.
        """
        ones, others = self.shallow.events, self.deep.events
        insertions = []
        i = j = 0
        while i < len(ones) or j < len(others):
            if i < len(ones) and j < len(others) and self._match(self.state, ones[i], others[j]):
                self.positions.append(j)
                i, j = i + 1, j + 1
                continue
            end = self._end_of_insertion(i, j)
            for event in others[j:end]:
                self.state.insert(event)
            for part in self._parts(i, j, end):
                insertions.append((i, j, j + part))
                j += part
        return insertions

    def _parts(self, i: int, j: int, end: int) -> list[int]:
        """Return the lengths of an insertion's parts; all copies of a part precede the next part's copies.

        An insertion has parts if it lengthens rows of equal operations on all parameters, as optimizers run
        them: its first events are of the same kind as the event before it, its last events of the same kind
        as the event after it.
        """
        if not 0 < i < len(self.shallow.events):
            return [end - j]
        deep_sites = self.deep.sites
        parts = [list(part) for _, part in groupby(self.deep.events[j:end], partial(_kind, deep_sites))]
        before = _kind(deep_sites, self.deep.events[j - 1])
        after = _kind(self._names, self.shallow.events[i])
        is_row = before != after and [before, after] == [_kind(deep_sites, parts[k][0]) for k in (0, -1)]
        return [len(part) for part in parts] if is_row else [end - j]

    def _end_of_insertion(self, i: int, j: int) -> int:
        """Return the end of an insertion in the deeper trace: the index after which the traces match longest.

        Raises NotRepeatedError if no end of the insertion gives a match.
        """
        others = self.deep.events
        state = self.state.fork()
        best, most = 0, 0
        for end in range(j + 1, min(len(others), j + _LARGEST_INSERTION) + 1):
            if isinstance(others[end - 1], PhaseStart):
                break
            state.insert(others[end - 1])
            count = self._count_alike(state.fork(), i, end)
            if count >= _LOOKAHEAD or (count and self._lengthens_rows(j, end, count)):
                return end
            if count > most:
                best, most = end, count
        if not best:
            raise NotRepeatedError(
                f"event {i} of {len(self.shallow.events)} has no counterpart in the deeper model"
            )
        return best

    def _lengthens_rows(self, j: int, end: int, count: int) -> bool:
        """Return whether an insertion and the matching events after it lengthen rows of equal allocations.

        An example is a row of blocks that an optimizer allocates for all parameters of one size.
        """
        row = self.deep.events[max(0, j - 1) : end]
        next_row = self.deep.events[end : end + count + 1]
        return _are_alike(row) and _are_alike(next_row)

    def _count_alike(self, state: _State, i: int, j: int) -> int:
        """Return the number of matching events, at most `_LOOKAHEAD`, starting at two indices of the traces.

        The count is `_LOOKAHEAD` if the match reaches the start of a phase, the end of both traces, or the
        next insertion: an event that allocates or frees memory of the inserted block. The count is 0 if only
        one trace ends.
        """
        ones, others = self.shallow.events, self.deep.events
        for count in range(_LOOKAHEAD):
            at, other_at = i + count, j + count
            if at == len(ones) or other_at == len(others):
                return _LOOKAHEAD if at == len(ones) and other_at == len(others) else 0
            if not self._match(state, ones[at], others[other_at]):
                other = others[other_at]
                born = self._allocs[other.block] if isinstance(other, Free) else other
                is_next = isinstance(born, Alloc) and self._is_of_inserted[born.site]
                return _LOOKAHEAD if count and is_next else count
            if isinstance(ones[at], PhaseStart):
                return _LOOKAHEAD
        return _LOOKAHEAD

    def _match(self, state: _State, one: Event, other: Event) -> bool:
        if isinstance(one, Alloc) and isinstance(other, Alloc):
            return self._match_allocs(state, one, other)
        if isinstance(one, Free) and isinstance(other, Free):
            mapped = state.deep_of[one.block]
            if mapped == other.block:
                return one.empties_cache == other.empties_cache
            is_replaced = mapped in state.freed or self._follows(mapped, other.block)
            if not is_replaced or other.block not in state.born:
                return False
            return state.successors.setdefault(mapped, other.block) == other.block
        return one == other

    def _follows(self, block: int, other: int) -> bool:
        """Return whether memory block `other` of the inserted model block corresponds to `block`.

        `block` is a memory block of the model block before the inserted model block.
        """
        one, next_one = self._allocs[block], self._allocs[other]
        site = self.deep.sites[one.site]
        expected = _shifted(site, self.layer, self.inserted - 1)
        is_alike = one.size_bytes == next_one.size_bytes
        return expected != site and expected == self.deep.sites[next_one.site] and is_alike

    def _match_allocs(self, state: _State, one: Alloc, other: Alloc) -> bool:
        if self._names[one.site] != self.deep.sites[other.site] or self._is_of_inserted[other.site]:
            return False
        if (one.category, one.may_fail, one.stream) != (other.category, other.may_fail, other.stream):
            return False
        grown = other.size_bytes - one.size_bytes
        if grown:
            if not 0 < grown <= _LARGEST_GROWTH * one.size_bytes:
                return False
            state.added_bytes[one.block] = grown
        state.deep_of[one.block] = other.block
        return True


def _structure(trace: Trace) -> tuple[object, ...]:
    """Return the sites and events of a trace, with the size of each allocation set to 0."""
    events = (replace(one, size_bytes=0) if isinstance(one, Alloc) else one for one in trace.events)
    return (trace.sites, *events)


def _with_size(event: Event, like: Event) -> Event:
    """Return an allocation with the size of the allocation `like`, or another event unchanged."""
    if isinstance(event, Alloc) and isinstance(like, Alloc):
        return replace(event, size_bytes=like.size_bytes)
    return event


def _kind(sites: Sequence[Site], event: Event) -> Site | type[Free] | PhaseStart:
    """Return the site of an allocation, the class `Free` for a free, or a `PhaseStart` unchanged."""
    if isinstance(event, Alloc):
        return sites[event.site]
    return Free if isinstance(event, Free) else event


def _is_alike(one: Alloc, other: Event) -> bool:
    """Return whether `other` is an allocation that equals `one` apart from the block's number."""
    return isinstance(other, Alloc) and replace(other, block=one.block) == one


def _are_alike(events: Sequence[Event]) -> bool:
    first = events[0]
    return isinstance(first, Alloc) and all(_is_alike(first, event) for event in events)


def _shifted(site: Site, layer: re.Pattern[str], first: int, by: int = 1) -> Site:
    """Return the site with its model block's number increased by `by` if that number is at least `first`."""
    found = layer.search(site.module)
    if found is None or int(found[1]) < first:
        return site
    start, end = found.span(1)
    return Site(f"{site.module[:start]}{int(found[1]) + by}{site.module[end:]}", site.op)


def _in_terms_of_shallow(walk: _Walk, found: Sequence[tuple[int, int, int]]) -> RepeatedBlock:
    state, sites = walk.state, list(walk.shallow.sites)
    names = {deep: shallow for shallow, deep in state.deep_of.items()}
    names.update((block, -1 - block) for block in state.born)
    numbers = {site: number for number, site in enumerate(sites)}
    insertions: list[_Insertion] = []
    successors = {names[block]: names[successor] for block, successor in state.successors.items()}
    order = _Order(walk.shallow, successors)
    for position, start, end in found:
        renamed: list[Event] = []
        for event in walk.deep.events[start:end]:
            if isinstance(event, Alloc):
                site = walk.deep.sites[event.site]
                number = numbers.setdefault(site, len(numbers))
                if number == len(sites):
                    sites.append(site)
                renamed.append(replace(event, block=names[event.block], site=number))
            elif isinstance(event, Free):
                renamed.append(replace(event, block=names[event.block]))
        insertions.append(order.insertion(position, start, renamed))
    trace = replace(walk.shallow, sites=tuple(sites), growth_sources=())
    return RepeatedBlock(
        trace, walk.deep, walk.layer, walk.inserted, tuple(insertions), tuple(walk.positions),
        dict(state.added_bytes), successors,
    )  # fmt: skip


class _Order:
    """The rule that decides in which order the copies of an insertion follow each other."""

    def __init__(self, trace: Trace, successors: Mapping[int, int]) -> None:
        self._events = trace.events
        self._successors = successors
        self._births: dict[int, int] = {}  # index of the allocation by block
        self._phases: list[int] = []  # number of the phase by index of event
        phase = 0
        for index, event in enumerate(trace.events):
            phase += isinstance(event, PhaseStart)
            self._phases.append(phase)
            if isinstance(event, Alloc):
                self._births[event.block] = index
        self._phases.append(phase)
        self._origins: dict[int, _Insertion] = {}  # the insertion by a block that it allocates

    def insertion(self, position: int, start: int, events: Sequence[Event]) -> _Insertion:
        """Make an insertion of events and decide the order of its copies.

        Must be called for the insertions in the order of the trace.
        """
        freed = [event.block for event in events if isinstance(event, Free)]
        births = [self._successors.get(block, block) for block in freed]
        origins = [self._origins[block] for block in births if block in self._origins]
        is_reversed = bool(origins) and self._is_reversed(position, origins[0])
        inserted = _Insertion(position, start, tuple(events), is_reversed)
        self._origins.update((event.block, inserted) for event in events if isinstance(event, Alloc))
        return inserted

    def _is_reversed(self, position: int, origin: _Insertion) -> bool:
        """Return whether most memory blocks freed near a position are freed in reverse order of allocation.

        Only blocks allocated in the phase of the insertion `origin` count, and the result is relative to the
        order of `origin`.
        """
        votes = 0
        for step in (-1, 1):
            index = position - 1 if step < 0 else position
            seen = 0
            while 0 <= index < len(self._events) and seen < _VOTES:
                event = self._events[index]
                is_passed_on = isinstance(event, Free) and event.block in self._successors
                birth = self._births[event.block] if isinstance(event, Free) and not is_passed_on else -1
                is_held = birth >= 0 and index >= origin.position  # at the insertion's position
                if is_held and self._phases[birth] == self._phases[origin.position]:
                    seen += 1
                    votes += 1 if (birth >= origin.position) == (step < 0) else -1
                index += step
        return (votes > 0) != origin.is_reversed


class _Repetition:
    """A builder of the trace of a deeper model: the events of a trace with its insertions repeated."""

    def __init__(self, repeated: RepeatedBlock, copies: int) -> None:
        self._repeated, self._copies = repeated, copies
        self._next = 1 + max(event.block for event in repeated.trace.events if isinstance(event, Alloc))
        self._blocks: dict[tuple[int, int], int] = {}  # new block by inserted block and copy
        self._latest: dict[int, int] = {}  # the new block of the latest copy by inserted block
        self._sites: dict[Site, int] = {}  # number by site of the deeper model
        self._numbers: dict[tuple[int, int, int], int] = {}  # new site by site, first block, increase
        self._is_reversed = {
            event.block: one.is_reversed
            for one in repeated.insertions
            for event in one.events
            if isinstance(event, Alloc)
        }

    def trace(self) -> Trace:
        given = self._repeated.trace.events
        events: list[Event] = []
        for part, copy in self._repeated.parts(self._copies):
            if isinstance(part, _Insertion):
                events += self._copy_of(part, copy)
            else:
                events.append(self._grown(given[part]))
        return replace(self._repeated.trace, events=tuple(events), sites=tuple(self._sites))

    def _site(self, site: int, first: int, by: int) -> int:
        """Return the number of a site in the deeper model after its model block is renumbered."""
        key = site, first, by
        if key not in self._numbers:
            shifted = _shifted(self._repeated.trace.sites[site], self._repeated.layer, first, by)
            self._numbers[key] = self._sites.setdefault(shifted, len(self._sites))
        return self._numbers[key]

    def _grown(self, event: Event) -> Event:
        """Convert an event of the shallower model to the matching event of the deeper model."""
        if isinstance(event, Alloc):
            grown = self._repeated.added_bytes.get(event.block, 0) * self._copies
            site = self._site(event.site, self._repeated.inserted, self._copies)
            return replace(event, size_bytes=event.size_bytes + grown, site=site)
        if isinstance(event, Free) and event.block in self._repeated.successors:
            return replace(event, block=self._latest[self._repeated.successors[event.block]])
        return event

    def _copy_of(self, insertion: _Insertion, number: int) -> Iterator[Event]:
        for event in insertion.events:
            if isinstance(event, Alloc):
                self._blocks[event.block, number] = self._latest[event.block] = self._next
                yield replace(event, block=self._next, site=self._site(event.site, 0, number))
                self._next += 1
            elif isinstance(event, Free):
                yield replace(event, block=self._freed(event.block, number))

    def _freed(self, block: int, number: int) -> int:
        """Return the memory block that copy `number` of an insertion frees."""
        if block < 0:
            return self._blocks[block, number]
        successor = self._repeated.successors.get(block)
        if successor is None:
            return block
        before = number + 1 if self._is_reversed[successor] else number - 1  # in order of allocation
        return self._blocks.get((successor, before), block)
