"""A kernel's allocations and frees in a compact form, and the expansion into events."""

from collections.abc import Iterable, Sequence
from enum import StrEnum

from planner.program.events import Alloc, Category, Event, Free
from planner.program.kernels.convolution import Convolution


class OpKind(StrEnum):
    """The kinds of operations of a kernel on the allocator. Trace files contain the letters."""

    TRANSIENT = "p"  # a block that is freed immediately
    TRY = "t"  # a block that is freed at once, and without which the kernel falls back to another algorithm
    AUTOTUNE = "s"  # a TRY in the first call of a signature only; the cache is emptied after it
    CONVOLUTION = "q"  # the workspaces that cuDNN reports: a TRY, and before it an AUTOTUNE if it times
    HOLD = "h"  # a block that is freed by a release, or when the kernel returns
    KEEP = "k"  # a block that is never freed
    OUTPUT = "o"  # the next output is allocated
    OUTPUTS = "a"  # all remaining outputs are allocated
    RELEASE_ALL = "e"  # frees all held blocks, the last allocated first
    RELEASE = "r"  # frees the given number of held blocks, the last allocated first
    RELEASE_BENEATH = "b"  # frees the held block at the given distance below the last one
    CUBLAS = "c"  # cuBLAS allocates its workspace here; without this operation, at the end


KernelOps = tuple[tuple[OpKind, int], ...]  # each kind with a number of bytes or blocks
# The operations before cuDNN has reported the workspaces of its convolutions.
OpenKernelOps = tuple[tuple[OpKind, int | Convolution], ...]


def expand_kernel(
    ops: KernelOps,
    outputs: Sequence[list[Event]],
    cublas_bytes: int,
    site: int,
    number: int,
    stream: int = 0,
) -> list[Event]:
    """Expand the operations of one kernel call into allocator events.

    The events are those that a capture would record. New blocks are numbered from `number`, at most one per
    event. `outputs` has the allocation of each output, an empty list for an output that takes no memory.
    """
    events: list[Event] = []
    held: list[int | None] = []  # None: a block of 0 bytes, which counts when blocks are released
    coming = iter(outputs)
    if not any(kind in (OpKind.OUTPUT, OpKind.OUTPUTS) for kind, _ in ops):
        ops = ((OpKind.OUTPUTS, 0), *ops)
    for kind, size in (*ops, (OpKind.OUTPUTS, 0)):
        if kind == OpKind.OUTPUT:
            events += next(coming, [])
        elif kind == OpKind.OUTPUTS:
            for output in coming:
                events += output
        elif kind == OpKind.RELEASE_ALL:
            events += _freed([held.pop() for _ in range(len(held))])
        elif kind == OpKind.RELEASE:
            events += _freed([held.pop() for _ in range(min(size, len(held)))])
        elif kind == OpKind.RELEASE_BENEATH:
            events += _freed([held.pop(-1 - size)]) if size < len(held) else []
        elif kind == OpKind.CUBLAS:
            if cublas_bytes:
                events.append(_workspace(number + len(events), cublas_bytes, site, stream))
            cublas_bytes = 0
        elif size > 0:
            block = number + len(events)
            may_fail = kind in (OpKind.TRY, OpKind.AUTOTUNE)
            events.append(_workspace(block, size, site, stream, may_fail))
            if kind == OpKind.HOLD:
                held.append(block)
            elif kind != OpKind.KEEP:
                events.append(Free(block, kind == OpKind.AUTOTUNE))
        elif kind == OpKind.HOLD:
            held.append(None)
    if cublas_bytes:
        events.append(_workspace(number + len(events), cublas_bytes, site, stream))
    return [*events, *_freed(reversed(held))]


def _freed(blocks: Iterable[int | None]) -> list[Event]:
    return [Free(block) for block in blocks if block is not None]


def _workspace(block: int, size_bytes: int, site: int, stream: int, may_fail: bool = False) -> Alloc:
    return Alloc(block, size_bytes, Category.WORKSPACE, site, may_fail, stream)
