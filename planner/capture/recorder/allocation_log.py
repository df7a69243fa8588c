"""Log allocations and frees in order.

Allocations of gradient sums that run in place are dropped.
"""

import weakref
from dataclasses import dataclass
from math import inf
from typing import Any

from msgspec.structs import replace

from planner.capture.recorder.provenance import ProvenanceCollector
from planner.errors import BatchTooLargeError
from planner.program import Alloc, Category, Event, Free, Phase, PhaseStart, Site

_BLOCK_BYTES = 512  # kMinBlockSize of the caching allocator


@dataclass(slots=True)
class Block:
    """A recorded block whose category may still change."""

    number: int
    size_bytes: int
    category: Category
    site: int
    stream: int = 0
    may_fail: bool = False
    node: int = -1  # the number of the autograd node that ran, or -1 if none did


class StorageRef(weakref.ref[Any]):
    """A weak reference to a storage, with the storage's block. An in-place sum takes its operand's block."""

    __slots__ = ("block", "key")

    block: Block
    key: int  # the storage's identity


class AllocationLog:
    """A log (`records`) of one run's allocations, frees and phase starts."""

    def __init__(self, provenance: ProvenanceCollector | None, most_blocks: float = inf) -> None:
        self.records: list[Block | Free | PhaseStart] = []
        self._provenance = provenance
        self._alive: dict[int, Block] = {}
        self._blocks, self._most_blocks = 0, most_blocks
        self._sites: dict[tuple[str, str], int] = {}
        self._sum: tuple[Block, StorageRef] | None = None  # operand and sum that may prove to be in place
        self._closed = False

    def start_phase(self, step: int, phase: Phase) -> None:
        """Record the start of a phase. Nothing after the start of `END` is recorded."""
        self._sum = None
        self.records.append(PhaseStart(step, phase))
        self._closed = phase is Phase.END

    def keep_for_backward(self) -> None:
        """Change the category of living temporaries to activations."""
        for block in self._alive.values():
            if block.category is Category.TEMPORARY:
                block.category = Category.ACTIVATION

    def alloc(self, size_bytes: int, category: Category, op: str, module: str, stream: int = 0) -> Block:
        """Return a new block, which is recorded unless the phase `END` has started.

        An operator `op` in a module allocates it for work on a stream. Raises BatchTooLargeError if there are
        more blocks than the log may have.
        """
        self._sum = None
        sites, number = self._sites, self._blocks
        if number >= self._most_blocks:
            raise BatchTooLargeError(f"more than {number:,} tensors are allocated")
        block = Block(number, size_bytes, category, sites.setdefault((module, op), len(sites)), stream)
        self._blocks = number + 1
        if self._closed:
            return block
        self._alive[number] = block
        self.records.append(block)
        if self._provenance is not None:
            self._provenance.on_alloc(number)
        return block

    def set_module(self, block: Block, module: str) -> None:
        """Change the module that counts as the allocator of a block."""
        op = [*self._sites][block.site][1]
        block.site = self._sites.setdefault((module, op), len(self._sites))

    def free(self, block: Block, *, empties_cache: bool = False) -> None:
        """Record that a block is freed, unless an in-place sum of gradients keeps it or `END` has started.

        See `Free.empties_cache` for the flag.
        """
        if self._closed or (self._sum is not None and self._sum_was_in_place(block)):
            return
        del self._alive[block.number]
        self.records.append(Free(block.number, empties_cache))

    def empty_cache(self, since: int) -> bool:
        """Mark the last record as emptying the cache too, if it is a free, and return whether it was marked.

        A free among the first `since` records is not marked. Starts of phases at the end of the log are
        skipped, and after the start of `END` nothing is marked.
        """
        if self._closed:
            return False
        last = len(self.records) - 1
        while last >= since and isinstance(self.records[last], PhaseStart):
            last -= 1
        record = self.records[last] if last >= since else None
        if not isinstance(record, Free):
            return False
        self.records[last] = replace(record, empties_cache=True)
        return True

    def expect_inplace_accumulation(self, operand: Block, out: StorageRef) -> None:
        """Prepare to drop the allocation of the gradient sum `out` if `operand` is freed next.

        The sum `out` is then in place, and takes the block of `operand`. Nothing is dropped if `out` is not
        the last record.
        """
        if self.records[-1] is out.block:
            self._sum = (operand, out)

    def _sum_was_in_place(self, freed: Block) -> bool:
        assert self._sum is not None
        operand, out = self._sum
        self._sum = None
        if freed is not operand:
            return False
        self.records.pop()  # the allocation of the sum, which keeps its operand's block
        del self._alive[out.block.number]
        out.block = operand
        return True

    def allocated_bytes(self) -> tuple[int, int]:
        """Return the allocated bytes now and at the peak, with each block rounded up to 512 bytes."""
        sizes: dict[int, int] = {}
        allocated = most = 0
        for record in self.records:
            if isinstance(record, Block):
                sizes[record.number] = -(-record.size_bytes // _BLOCK_BYTES) * _BLOCK_BYTES
                allocated += sizes[record.number]
                most = max(most, allocated)
            elif isinstance(record, Free):
                allocated -= sizes[record.block]
        return allocated, most

    def events(self) -> tuple[Event, ...]:
        """Return the records as events of a trace."""
        return tuple(map(_event, self.records))

    def sites(self) -> tuple[Site, ...]:
        """Return the sites (module and operator) of the blocks, in the order of their numbers in events."""
        return tuple(Site(module, op) for module, op in self._sites)


def _event(record: Block | Free | PhaseStart) -> Event:
    if isinstance(record, Block):
        kind = record.category, record.site
        return Alloc(record.number, record.size_bytes, *kind, record.may_fail, record.stream)
    return record
