"""Attribute the blocks of a recorded history to a category, a module and a line of the script."""

import linecache
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from planner.allocator.history import HistoryEvent, interleave
from planner.emulator import PLACED, Holder, ProcessHistory, ScriptLog, ScriptMark, trace_of
from planner.program import Alloc, Category, Event, Phase, Site, TensorProvenance, Trace

# The number of events with actions in `PLACED` before a note, and the mark or the holders that are noted.
_Note = tuple[int, ScriptMark | tuple[Holder, ...]]
# Of several holders of a block, the holder whose category comes first decides.
_PRECEDENCE = (Category.PARAMETER, Category.OPTIMIZER, Category.GRADIENT, Category.INPUT, Category.ACTIVATION)


def attributed_trace(history: ProcessHistory, batch: int, blas_bytes: int) -> Trace:
    """Convert a recorded history to a trace with the category, module and source line of each block.

    Parameters, gradients, optimizer state and inputs are recognized by their addresses. A block that is
    allocated in the forward pass and alive when the backward pass starts is an activation. `blas_bytes` is
    the size of the workspace that cuBLAS never frees. Raises ValueError if the history records no phases and
    modules (`script_log`) or does not begin with the process.
    """
    if history.script_log is None:
        raise ValueError("the history records no phases and modules")
    plain = trace_of(history, batch)
    blocks = _Walk().over(history, history.script_log)
    sites: dict[Site, int] = {}
    events: list[Event] = []
    details = []
    for event in plain.events:
        if isinstance(event, Alloc):
            block = blocks[event.block]
            category = Category.WORKSPACE if block.is_blas(blas_bytes) else block.category or event.category
            site = Site(block.module, block.op)
            event = msgspec.structs.replace(event, category=category, site=sites.setdefault(site, len(sites)))
            if block.line:
                details.append(TensorProvenance(event.block, (), "", block.line, _code(block.line)))
        events.append(event)
    return Trace(tuple(events), tuple(sites), batch, provenance=tuple(details))


def _code(source: str) -> str:
    file, _, line = source.rpartition(":")
    return linecache.getline(file, int(line)).strip() if line.isdigit() else ""


@dataclass(slots=True)
class _Block:
    """A block of a history, with its origin and category."""

    requested_bytes: int
    line: str  # FILE:LINE of the script; "" if no line of it was on the stack
    op: str
    phase: Phase
    module: str
    step: int  # optimizer steps that ended before its allocation
    category: Category | None = None
    dies_in: int | None = None  # optimizer steps that ended before it is freed; None if it is never freed

    def is_blas(self, blas_bytes: int) -> bool:
        """Return whether the block is a workspace that cuBLAS keeps, by its size, lifetime and category."""
        outlives_step = self.dies_in is None or self.dies_in > self.step
        return (
            self.requested_bytes == blas_bytes
            and outlives_step
            and self.category in (None, Category.ACTIVATION)
        )

    def hold(self, category: Category, module: str) -> None:
        """Set the block's category and module, unless its current category has equal or higher precedence."""
        if self.category is None or _PRECEDENCE.index(category) < _PRECEDENCE.index(self.category):
            self.category = category
            self.module = module or self.module


@dataclass(slots=True)
class _Walk:
    """A pass over a history that collects its blocks and their categories."""

    blocks: list[_Block] = field(default_factory=list)  # in order of allocation
    phase: Phase = Phase.SETUP
    module: str = ""
    _live: dict[int, int] = field(default_factory=dict)  # block by address
    _first: list[_Block] = field(default_factory=list)  # blocks alive when the first forward pass begins
    _copying: set[str] = field(default_factory=set)  # lines that bring a batch to the GPU

    def over(self, history: ProcessHistory, script_log: ScriptLog) -> list[_Block]:
        """Return the blocks of a history in order of allocation, categorized by addresses and phases."""
        notes: list[_Note] = [(place, script_log.tables[index]) for place, index in script_log.held]
        notes += ((mark.place, mark) for mark in script_log.marks)
        notes.sort(key=_order)
        ends = [end.allocated + end.freed for end in history.step_ends]
        place = 0
        for item in interleave(history.events, notes, PLACED):
            if isinstance(item, HistoryEvent):
                self._happen(item, history, bisect_right(ends, place))
                place += item.action in PLACED
            else:
                self._note(item)
        if self.phase is Phase.FORWARD:  # the history ends before the backward pass
            self._begin_backward()
        for block in self._first:
            if block.line in self._copying:
                block.hold(Category.INPUT, "")
        return self.blocks

    def _happen(self, event: HistoryEvent, history: ProcessHistory, step: int) -> None:
        if event.action == "alloc":
            site = history.sites[event.site] if event.site >= 0 else Site("", "")
            # autograd's own threads run no Python function
            op = site.op or ("autograd" if self.phase is Phase.BACKWARD else "")
            self._live[event.address] = len(self.blocks)
            self.blocks.append(_Block(event.size_bytes, site.module, op, self.phase, self.module, step))
        elif event.action == "free_completed" and event.address in self._live:
            self.blocks[self._live.pop(event.address)].dies_in = step

    def _note(self, note: ScriptMark | tuple[Holder, ...]) -> None:
        if not isinstance(note, ScriptMark):
            for holder in note:
                if holder.address in self._live:
                    self.blocks[self._live[holder.address]].hold(holder.category, holder.module)
            return
        if self.phase is Phase.FORWARD and note.phase is Phase.BACKWARD:
            self._begin_backward()
        elif self.phase in (Phase.SETUP, Phase.INPUTS) and note.phase is Phase.FORWARD:
            self._begin_forward()
        self.phase, self.module = note.phase, note.module

    def _begin_forward(self) -> None:
        if self.phase is Phase.SETUP:
            self._first = list(self._alive())
        for block in self._alive():
            if block.phase is Phase.INPUTS and block.category is None:
                block.hold(Category.INPUT, "")
                self._copying.add(block.line)

    def _begin_backward(self) -> None:
        for block in self._alive():
            if block.phase is Phase.FORWARD:
                block.hold(Category.ACTIVATION, "")

    def _alive(self) -> Iterable[_Block]:
        return (self.blocks[number] for number in self._live.values())


def _order(note: _Note) -> tuple[int, bool]:
    """Return a key that sorts notes by position in the history.

    At one position, holders of blocks come before marks.
    """
    return note[0], isinstance(note[1], ScriptMark)
