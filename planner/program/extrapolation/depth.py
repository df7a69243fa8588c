"""Find the repeated block of a model by comparing the traces of two shallow models.

The two traces are compared event by event. The additional events of the deeper trace are the insertions that
one more block adds; a still deeper model repeats each insertion.
"""

import re
from collections import ChainMap
from collections.abc import Mapping, MutableMapping, Sequence
from functools import partial
from itertools import groupby

from msgspec import Struct
from msgspec.structs import replace

from planner.program.events import Alloc, Event, Free, PhaseStart, Site, Trace
from planner.program.extrapolation.repeated_block import (
    BLOCK,
    Insertion,
    NotRepeatedError,
    RepeatedBlock,
    shifted_site,
)

SHALLOW = 4  # number of blocks of the shallower model: the first, the last and two between them
CHECKED = 7  # number of blocks of a model that is captured to check an extrapolation
_LOOKAHEAD = 48  # events that must match after an insertion, so that one equal size does not end it
_LARGEST_INSERTION = 4096
_LARGEST_GROWTH = 1 / 3  # as a share of the size, of a tensor with one number per parameter (clip_grad_norm_)
_VOTES = 4  # frees on each side of an insertion that decide its order


def compare_depths(shallow: Trace, deep: Trace, layer: re.Pattern[str] = BLOCK) -> RepeatedBlock:
    """Find a model's repeated block by comparing traces of two models that differ by one block.

    The models have `SHALLOW` and `SHALLOW + 1` blocks. `layer` finds the number of a block in a
    module's name, as its only group. The block in the middle counts as the added block, since the first and
    the last block may differ from the other blocks. Raises NotRepeatedError.
    """
    walk = _Walk(shallow, deep, layer, SHALLOW // 2)
    insertions = walk.run()
    return _in_terms_of_shallow(walk, insertions)


class _State(Struct):
    """The correspondence between the memory blocks of two traces.

    Changes to a fork do not change the original.
    """

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
    """A comparison of two traces that finds the events that the deeper trace has in addition."""

    def __init__(self, shallow: Trace, deep: Trace, layer: re.Pattern[str], inserted: int) -> None:
        self.shallow, self.deep = shallow, deep
        self.state = _State({}, {}, {}, {}, {})
        self.layer, self.inserted = layer, inserted
        self._allocs = {event.block: event for event in deep.events if isinstance(event, Alloc)}
        self._names = [shifted_site(site, layer, inserted) for site in shallow.sites]
        numbers = [layer.search(site.module) for site in deep.sites]
        self._is_of_inserted = [number is not None and int(number[1]) == inserted for number in numbers]
        self.positions: list[int] = []  # of the deeper trace's counterparts of the shallower trace's events

    def run(self) -> list[tuple[int, int, int]]:
        """Compare the traces, and return the position, start and end of each range of additional events.

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
        """Split an insertion into parts that are repeated separately, and return their lengths.

        All copies of a part precede the copies of the next part. An insertion has several parts if it
        lengthens rows of equal operations on all parameters, as optimizers run them: its first events are of
        the same kind as the event before it, its last events of the same kind as the event after it.
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
        """Return the index in the deeper trace at which an insertion ends.

        It is the first index after which `_LOOKAHEAD` events match, or after which the insertion and the
        following events lengthen rows. If there is none, it is the index after which most events match.
        Raises NotRepeatedError if no events match after any index.
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
        """Return whether an insertion and the following events lengthen rows of equal allocations.

        An example is a row of blocks that an optimizer allocates for all parameters of one size.
        """
        row = self.deep.events[max(0, j - 1) : end]
        next_row = self.deep.events[end : end + count + 1]
        return _are_alike(row) and _are_alike(next_row)

    def _count_alike(self, state: _State, i: int, j: int) -> int:
        """Return the number of events that match from two indices on, at most `_LOOKAHEAD`.

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
        """Return whether memory block `other` of the inserted model block is the counterpart of `block`.

        Both are of the deeper trace, and `block` is of the model block before the inserted model block. They
        are counterparts if they have the same operator, place in the model block and size.
        """
        one, next_one = self._allocs[block], self._allocs[other]
        site = self.deep.sites[one.site]
        expected = shifted_site(site, self.layer, self.inserted - 1)
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


def _kind(sites: Sequence[Site], event: Event) -> Site | type[Free] | PhaseStart:
    """Return a value that is equal for events of the same kind.

    It is the site of an allocation, the class `Free` for a free, or the `PhaseStart` itself.
    """
    if isinstance(event, Alloc):
        return sites[event.site]
    return Free if isinstance(event, Free) else event


def _is_alike(one: Alloc, other: Event) -> bool:
    """Return whether two allocations are equal apart from the block's number."""
    return isinstance(other, Alloc) and replace(other, block=one.block) == one


def _are_alike(events: Sequence[Event]) -> bool:
    first = events[0]
    return isinstance(first, Alloc) and all(_is_alike(first, event) for event in events)


def _in_terms_of_shallow(walk: _Walk, found: Sequence[tuple[int, int, int]]) -> RepeatedBlock:
    state, sites = walk.state, list(walk.shallow.sites)
    names = {deep: shallow for shallow, deep in state.deep_of.items()}
    names.update((block, -1 - block) for block in state.born)
    numbers = {site: number for number, site in enumerate(sites)}
    insertions: list[Insertion] = []
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
    """A builder of insertions that decides the order of the copies of each insertion."""

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
        self._origins: dict[int, Insertion] = {}  # the insertion by a block that it allocates

    def insertion(self, position: int, start: int, events: Sequence[Event]) -> Insertion:
        """Create an insertion, and decide the order of its copies.

        Must be called for the insertions in the order of the trace.
        """
        freed = [event.block for event in events if isinstance(event, Free)]
        births = [self._successors.get(block, block) for block in freed]
        origins = [self._origins[block] for block in births if block in self._origins]
        is_reversed = bool(origins) and self._is_reversed(position, origins[0])
        inserted = Insertion(position, start, tuple(events), is_reversed)
        self._origins.update((event.block, inserted) for event in events if isinstance(event, Alloc))
        return inserted

    def _is_reversed(self, position: int, origin: Insertion) -> bool:
        """Return whether the copies of an insertion at a position come in reverse order.

        The order is opposite to the order of `origin`, which allocates blocks that the insertion frees, if
        blocks near the position are mostly freed in reverse order of allocation, else the same. Only blocks
        allocated in the phase of `origin` count.
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
