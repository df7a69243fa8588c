"""A small trace whose events are written out, and recordings made by hand."""

from collections.abc import Iterable, Sequence

from planner.allocator.config import MIB
from planner.program.events import Alloc, Category, Event, Free, Phase, PhaseStart, Site, Trace

CONV, NORM, COPY = "aten.convolution.default", "aten.native_batch_norm.default", "aten.copy"
SITES = (Site("", COPY), Site("a.conv", CONV), Site("a.norm", NORM))
EVENTS = (
    *(PhaseStart(1, Phase.INPUTS), Alloc(0, 3 * MIB, Category.INPUT, 0)),
    *(
        PhaseStart(1, Phase.FORWARD),
        Alloc(1, 8 * MIB, Category.ACTIVATION, 1),
        Alloc(2, 8 * MIB, Category.TEMPORARY, 2),
    ),
    *(
        Alloc(3, 1024, Category.WORKSPACE, 2),
        Free(3),
        Free(2),
        Alloc(4, 5 * MIB, Category.ACTIVATION, 1),
    ),
    PhaseStart(1, Phase.END),
)
LITERAL = Trace(EVENTS, SITES, 8)


Block = tuple[int, int | None]  # its size and how many blocks are allocated before its end
Mark = tuple[int, PhaseStart]  # how many blocks are allocated before it


def blocks_of(events: Iterable[Event]) -> list[Block]:
    """Return the blocks of a trace or a recording."""
    blocks: list[Block] = []
    place: dict[int, int] = {}
    for event in events:
        if isinstance(event, Alloc):
            place[event.block] = len(blocks)
            blocks.append((event.size_bytes, None))
        elif isinstance(event, Free):
            index = place[event.block]
            blocks[index] = blocks[index][0], len(blocks)
    return blocks


def marks_of(events: Iterable[Event]) -> list[Mark]:
    """Return where phases begin."""
    marks, allocated = [], 0
    for event in events:
        allocated += isinstance(event, Alloc)
        if isinstance(event, PhaseStart):
            marks.append((allocated, event))
    return marks


def events_of(blocks: Sequence[Block], marks: Sequence[Mark]) -> tuple[Event, ...]:
    """Return the events of blocks without sites."""
    events: list[Event] = []
    for index in range(len(blocks) + 1):
        events += (mark for place, mark in marks if place == index)
        events += (Free(block) for block, (_, end) in enumerate(blocks) if end == index)
        if index < len(blocks):
            events.append(Alloc(index, blocks[index][0], Category.TEMPORARY, -1))
    return tuple(events)
