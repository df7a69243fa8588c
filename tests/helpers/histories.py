"""A small trace whose events are written out."""

from planner.allocator.config import MIB
from planner.program.events import Alloc, Category, Free, Phase, PhaseStart, Site, Trace

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
