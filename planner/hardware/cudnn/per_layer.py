"""The workspaces of a model's convolutions, layer by layer, from a trace that was taken with details."""

from collections.abc import Iterator

from msgspec import Struct

from planner.hardware.cudnn.workspace_breakdown import Part, Term, name_parts
from planner.program import Alloc, ConvWorkspace, Direction, Trace


class LayerWorkspace(Struct, frozen=True):
    """The workspace of one convolution in one direction, however often it runs."""

    module: str  # qualified; "" outside of modules
    direction: Direction  # as cuDNN sees it: the forward pass of a transposed one is a data gradient
    size_bytes: int  # as it is asked for
    searched: bool  # room for the largest of all engines, while they are timed
    engine: int | None  # None where the fitted term told it
    notes: str
    parts: tuple[Part, ...]  # add up to `size_bytes`


def layer_workspaces(trace: Trace) -> tuple[LayerWorkspace, ...]:
    """Return each once, by falling size; none where the trace has no details of them."""
    found = dict.fromkeys(_rows(trace))
    return tuple(sorted(found, key=lambda one: -one.size_bytes))


def _rows(trace: Trace) -> Iterator[LayerWorkspace]:
    asked = {row.block: row for row in trace.conv_workspaces}
    for event in trace.events:
        row = asked.get(event.block) if isinstance(event, Alloc) else None
        if row is None or not isinstance(event, Alloc):
            continue
        size_bytes = event.size_bytes
        engine = None if row.engine < 0 else row.engine
        module = trace.sites[event.site].module
        yield LayerWorkspace(
            module, row.direction, size_bytes, row.searched, engine, row.notes, _parts(row, size_bytes)
        )


def _parts(row: ConvWorkspace, size_bytes: int) -> tuple[Part, ...]:
    if row.engine < 0:
        return (Part(Term.IMAGES, "w", row.x[0], size_bytes),)
    return name_parts(row.convolution, tuple(row.notes.split(", ")), size_bytes)
