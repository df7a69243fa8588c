"""Extrapolate a trace to a deeper model by repeating the events that one more block adds.

An insertion may free memory of the block before it, such as parameters that FSDP gathered for that block;
each copy then frees the memory of the copy before it.
"""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from planner.program.events import Alloc, Event, Free, Site, Trace

BLOCK = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")  # the number of a block in a module's name


class NotRepeatedError(Exception):
    """The error for runs that cannot be extrapolated to a deeper model from one repeated block.

    The message says why.
    """


class Insertion(Struct, frozen=True):
    """Consecutive events that one more model block adds. Their memory blocks have negative numbers."""

    position: int  # index of the shallower trace's event before which they are inserted
    start: int  # index of the first of these events in the deeper trace
    events: tuple[Event, ...]
    is_reversed: bool  # whether the deepest block's copy comes first, as in a backward pass


class Origin(NamedTuple):
    """The event of the deeper trace that an extrapolated event repeats."""

    event: int  # its index in the deeper trace
    block: int | None  # number of the added block's copy, from 0; None if the event is of another block


class RepeatedBlock(Struct, frozen=True):
    """A trace, with the events and bytes that each further copy of the repeated block adds."""

    trace: Trace
    deep: Trace  # the trace of the model with one more block
    layer: re.Pattern[str]  # finds the number of a block in a module's name
    inserted: int  # number of the first added block; equal and higher numbers are increased
    insertions: tuple[Insertion, ...]
    positions: tuple[int, ...]  # index in the deeper trace of each event of `trace`
    added_bytes: Mapping[int, int]  # by memory block: its growth with each further model block
    successors: Mapping[int, int]  # by memory block that an insertion frees: the inserted block replacing it

    def with_more(self, blocks: int) -> Trace:
        """Return the trace of a model with `blocks` more repeated blocks."""
        return _Repetition(self, blocks).trace() if blocks else self.trace

    def with_sizes_of(self, deep: Trace) -> "RepeatedBlock":
        """Return the `RepeatedBlock` with the sizes of another trace of the deeper model.

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
        """Yield the indices, in the deeper trace, of allocations that grow with the number of blocks."""
        for event, index in zip(self.trace.events, self.positions, strict=True):
            if isinstance(event, Alloc) and event.block in self.added_bytes:
                yield index

    def origins(self, blocks: int) -> list[Origin]:
        """Return the origin of each event of `with_more(blocks)`. `blocks` is positive."""
        origins: list[Origin] = []
        for part, copy in self.parts(blocks):
            if isinstance(part, Insertion):
                origins += (Origin(part.start + k, copy) for k in range(len(part.events)))
            else:
                origins.append(Origin(self.positions[part], None))
        return origins

    def site(self, site: Site, origin: Origin, blocks: int) -> Site:
        """Return the site in `with_more(blocks)` of an event whose origin has `site` in the deeper trace."""
        if origin.block is None:
            return shifted_site(site, self.layer, self.inserted + 1, blocks - 1)
        return shifted_site(site, self.layer, 0, origin.block)

    def parts(self, blocks: int) -> Iterator[tuple[Insertion | int, int]]:
        """Yield the insertions and events of `with_more(blocks)` in order, each with a copy number.

        A part is an insertion, or the index of an event of `trace`, whose copy number is 0.
        """
        inserted: dict[int, list[Insertion]] = {}
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


def _structure(trace: Trace) -> tuple[object, ...]:
    """Return the sites and events of a trace, with the size of each allocation set to 0."""
    events = (replace(one, size_bytes=0) if isinstance(one, Alloc) else one for one in trace.events)
    return (trace.sites, *events)


def _with_size(event: Event, like: Event) -> Event:
    """Return `event` with the size of `like` if both are allocations, else unchanged."""
    if isinstance(event, Alloc) and isinstance(like, Alloc):
        return replace(event, size_bytes=like.size_bytes)
    return event


def shifted_site(site: Site, layer: re.Pattern[str], first: int, by: int = 1) -> Site:
    """Return the site with its model block's number increased by `by` if the number is at least `first`."""
    found = layer.search(site.module)
    if found is None or int(found[1]) < first:
        return site
    start, end = found.span(1)
    return Site(f"{site.module[:start]}{int(found[1]) + by}{site.module[end:]}", site.op)


class _Repetition:
    """A builder of the trace of a deeper model by repeating the insertions."""

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
            if isinstance(part, Insertion):
                events += self._copy_of(part, copy)
            else:
                events.append(self._grown(given[part]))
        return replace(self._repeated.trace, events=tuple(events), sites=tuple(self._sites))

    def _site(self, site: int, first: int, by: int) -> int:
        """Renumber the model block of a site, and return the new site's number."""
        key = site, first, by
        if key not in self._numbers:
            shifted = shifted_site(self._repeated.trace.sites[site], self._repeated.layer, first, by)
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

    def _copy_of(self, insertion: Insertion, number: int) -> Iterator[Event]:
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
