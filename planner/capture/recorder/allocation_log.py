"""Blocks in the order in which they are born and die, and sums of gradients that make none."""

import weakref
from dataclasses import dataclass
from typing import Any

from planner.capture.recorder.provenance import Details
from planner.program import Alloc, Category, Event, Free, Phase, PhaseStart, Site


@dataclass(slots=True)
class Block:
    """A block while it is being recorded: its role is known only later."""

    number: int
    size_bytes: int
    role: Category
    site: int
    optional: bool = False


class Owner(weakref.ref[Any]):
    """A living storage and the block that it owns; a sum may take over its operand's block."""

    __slots__ = ("block", "key")

    block: Block
    key: int  # the storage's identity


class BlockLog:
    """The log of one run; `entries` are births, the numbers of blocks that die, and marks."""

    def __init__(self, details: Details | None) -> None:
        self.entries: list[Block | int | PhaseStart] = []
        self._details = details
        self._alive: dict[int, Block] = {}
        self._blocks = 0
        self._sites: dict[tuple[str, str], int] = {}
        self._sum: tuple[Block, Owner] | None = None  # an addition that may turn out to be in place
        self._closed = False

    def mark(self, step: int, phase: Phase) -> None:
        """From here on, births and deaths belong to this phase of this step; after the end none is told."""
        self._sum = None
        self.entries.append(PhaseStart(step, phase))
        self._closed = phase is Phase.END

    def keep_for_backward(self) -> None:
        """What is temporary and still alive turns out to be held for the backward pass."""
        for block in self._alive.values():
            if block.role is Category.TEMPORARY:
                block.role = Category.ACTIVATION

    def birth(self, size_bytes: int, role: Category, op: str, module: str) -> Block:
        """A new block, asked for by an operator in a module."""
        self._sum = None
        sites, number = self._sites, self._blocks
        block = Block(number, size_bytes, role, sites.setdefault((module, op), len(sites)))
        self._blocks = number + 1
        self._alive[number] = block
        self.entries.append(block)
        if self._details is not None:
            self._details.on_birth(number)
        return block

    def death(self, block: Block) -> None:
        """A block is given back; not, if a sum lives on in it."""
        if self._closed:
            return
        if self._sum is not None and self._sum_was_in_place(block):
            return
        del self._alive[block.number]
        self.entries.append(block.number)

    def expect_sum_in_place(self, operand: Block, out: Owner) -> None:
        """A sum of gradients was born right now; if its operand dies next, a GPU has added in place."""
        if self.entries[-1] is out.block and operand.size_bytes == out.block.size_bytes:
            self._sum = (operand, out)

    def events(self) -> tuple[Event, ...]:
        """The log as events, with every size as it was."""
        events: list[Event] = []
        for entry in self.entries:
            if isinstance(entry, Block):
                events.append(
                    Alloc(entry.number, entry.size_bytes, 0, entry.role, entry.site, entry.optional)
                )
            elif isinstance(entry, int):
                events.append(Free(entry))
            else:
                events.append(entry)
        return tuple(events)

    def sites(self) -> tuple[Site, ...]:
        """Who asked for the blocks, as the events count them."""
        return tuple(Site(module, op) for module, op in self._sites)

    def _sum_was_in_place(self, dying: Block) -> bool:
        assert self._sum is not None
        old, out = self._sum
        self._sum = None
        if dying is not old:
            return False
        self.entries.pop()  # the birth of the sum: it lives on in its operand's block
        del self._alive[out.block.number]
        out.block = old
        return True
