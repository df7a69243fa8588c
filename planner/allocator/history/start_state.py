"""Derive the reserved memory before a history by undoing the events backwards.

The memory after the history is known. A block that is in use throughout has the size that it has at the end.
The size of a block that was in use before and was freed follows from its request: it is rounded, and includes
the rest of its free space if that is too small to be split off, since no free block of the large pool is that
small (`should_split` in c10/cuda/CUDACachingAllocator.cpp).
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from planner.allocator.blocks import BlockState, PoolName, SegmentState
from planner.allocator.config import LARGEST_SMALL_BYTES, SMALL_SEGMENT_BYTES, AllocatorConfig
from planner.allocator.history.history import HistoryEvent


class UnequalStateError(ValueError):
    """The error for events that do not lead to the state after them."""


def start_before(
    events: Sequence[HistoryEvent], end: Iterable[SegmentState], config: AllocatorConfig
) -> tuple[SegmentState, ...]:
    """Return the reserved memory before the events, derived from the reserved memory `end` after them.

    The result is in ascending order of address. Raises UnequalStateError if the events do not lead to `end`,
    as when memory was used after the recording.
    """
    before = _Before(end, config)
    for event in reversed(events):
        before.undo(event)
    return before.state()


class _Used(NamedTuple):
    size_bytes: int
    is_exact: bool  # whether `size_bytes` is the block's full size, not only the rounded request


class _Piece(NamedTuple):
    size_bytes: int
    stream: int
    pool: PoolName


class _Before:
    """The reserved memory while events are undone, last event first."""

    def __init__(self, end: Iterable[SegmentState], config: AllocatorConfig) -> None:
        self._config = config
        self._used: dict[int, _Used] = {}
        self._pieces: dict[int, _Piece] = {}
        for state in end:
            self._pieces[state.address] = _Piece(state.size_bytes, state.stream, state.pool)
            for block in state.blocks:
                if block.in_use:
                    self._used[block.address] = _Used(block.size_bytes, is_exact=True)

    def undo(self, event: HistoryEvent) -> None:
        """Change the state after an event to the state before the event.

        Raises UnequalStateError if the event contradicts the state after it.
        """
        action, address, size_bytes = event[:3]
        if action == "alloc" and size_bytes:
            if self._used.pop(address, None) is None:
                raise UnequalStateError(f"no segment has the block at {address:#x} that was allocated")
        elif action == "free_completed":
            if address in self._used:
                raise UnequalStateError(f"the block at {address:#x} was freed and is in use at the end")
            self._used[address] = _Used(self._config.block_bytes(size_bytes), is_exact=False)
        elif action == "segment_alloc":
            if self._pieces.pop(address, None) is None:
                raise UnequalStateError(f"the segment at {address:#x} came and is not there at the end")
        elif action == "segment_free":
            pool: PoolName = "small" if size_bytes == SMALL_SEGMENT_BYTES else "large"
            self._pieces[address] = _Piece(size_bytes, event.stream, pool)
        elif action == "segment_map":
            self._cut(address, address + size_bytes)
        elif action == "segment_unmap":
            self._join(address, size_bytes, event.stream)

    def _cut(self, first: int, end: int) -> None:
        """Remove pages from the piece of memory that contains them.

        Raises UnequalStateError if no piece contains all of them.
        """
        start = max((address for address in self._pieces if address <= first), default=None)
        if start is None or start + self._pieces[start].size_bytes < end:
            raise UnequalStateError(f"the pages at {first:#x} were mapped and are not there at the end")
        piece = self._pieces.pop(start)
        for address, size_bytes in ((start, first - start), (end, start + piece.size_bytes - end)):
            if size_bytes:
                self._pieces[address] = piece._replace(size_bytes=size_bytes)

    def _join(self, first: int, size_bytes: int, stream: int) -> None:
        """Put unmapped pages back into the reserved memory, and merge them with their neighbours."""
        pool: PoolName = "large" if size_bytes % self._config.large_segment_bytes == 0 else "small"
        start, end = first, first + size_bytes
        following = self._pieces.pop(end, None)
        previous = next(
            (address for address, piece in self._pieces.items() if address + piece.size_bytes == first), None
        )
        if following is not None:
            end, pool = end + following.size_bytes, following.pool
        if previous is not None:
            start, pool = previous, self._pieces.pop(previous).pool
        self._pieces[start] = _Piece(end - start, stream, pool)

    def state(self) -> tuple[SegmentState, ...]:
        """Return the state of each piece with its blocks.

        Raises UnequalStateError if a block is in no piece.
        """
        places = sorted(self._used)
        states = []
        for address, piece in sorted(self._pieces.items()):
            first, end = (bisect_left(places, place) for place in (address, address + piece.size_bytes))
            blocks = tuple(self._tile(address, piece, places[first:end]))
            states.append(SegmentState(address, piece.size_bytes, piece.pool, blocks, piece.stream))
        held = sum(block.in_use for state in states for block in state.blocks)
        if held != len(places):
            raise UnequalStateError(f"{len(places) - held} blocks that were there before are in no segment")
        return tuple(states)

    def _tile(self, address: int, piece: _Piece, used: Sequence[int]) -> Iterator[BlockState]:
        """Yield the used and free blocks of a piece, in ascending order of address.

        Raises UnequalStateError if blocks overlap.
        """
        end = address + piece.size_bytes
        place = address
        for start, following in pairwise([*used, end]):
            if start > place:
                yield BlockState(place, start - place, False)
            size_bytes = self._size(start, following, piece.pool)
            if start < place or start + size_bytes > following:
                raise UnequalStateError(f"blocks overlap at {start:#x}")
            yield BlockState(start, size_bytes, True)
            place = start + size_bytes
        if place < end:
            yield BlockState(place, end - place, False)

    def _size(self, start: int, following: int, pool: PoolName) -> int:
        size_bytes, is_exact = self._used[start]
        if is_exact or pool == "small" or self._config.expandable_segments:
            return size_bytes  # these pools split off a rest of any size
        most_bytes = self._config.max_split_bytes
        is_whole = most_bytes is not None and size_bytes >= most_bytes
        rest_bytes = following - start - size_bytes
        return size_bytes + rest_bytes if is_whole or 0 < rest_bytes <= LARGEST_SMALL_BYTES else size_bytes
