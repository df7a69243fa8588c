"""Operations of a kernel on the allocator, in the order in which a workspace rule lists them.

A rule gives a sequence of ops for one call of an operator. A plain number is a block of so many bytes that is
freed before the next op. A rule without `Output` and `Outputs` has all outputs made before its first op;
outputs that it does not name are made after its last. Blocks of no bytes are skipped.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from planner.program import ConvWorkspace, OpKind, Target


@dataclass(frozen=True, slots=True)
class Hold:
    """Allocate a block that lives until it is released or the kernel returns."""

    size_bytes: int


# Returns the provenance of the block of this number; called for explanations alone, where shapes are numbers.
ExplainBlock = Callable[[int], ConvWorkspace]


@dataclass(frozen=True, slots=True)
class TryAlloc:
    """Allocate a block and free it at once; the kernel falls back if the allocation fails."""

    size_bytes: int
    explain: ExplainBlock | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class AutotuneAlloc:
    """Like `TryAlloc`, but only in the first call of a signature: operator, shapes and arguments."""

    size_bytes: int
    explain: ExplainBlock | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Release:
    """Free the held blocks that were allocated last."""

    blocks: int


@dataclass(frozen=True, slots=True)
class ReleaseBeneath:
    """Free the held blocks that were allocated right before the last one."""

    blocks: int


@dataclass(frozen=True, slots=True)
class Output:
    """Make one output: the next, or as many further on as `skipped` says."""

    skipped: int = 0


@dataclass(frozen=True, slots=True)
class Outputs:
    """Make all outputs that are not made yet."""


Op = int | Hold | TryAlloc | AutotuneAlloc | Release | ReleaseBeneath | Output | Outputs
Ops = tuple[Op, ...]
Args = tuple[Any, ...]
Rule = Callable[[Args, Any, Target], Ops]  # arguments, result, GPU

_KINDS: dict[type, OpKind] = {
    Hold: OpKind.HOLD,
    TryAlloc: OpKind.TRY,
    AutotuneAlloc: OpKind.AUTOTUNE,
    Release: OpKind.RELEASE,
    ReleaseBeneath: OpKind.RELEASE_BENEATH,
    Output: OpKind.OUTPUT,
    Outputs: OpKind.OUTPUTS,
}


def kind_and_size(op: Op) -> tuple[OpKind, Any]:
    """Return an op as programs store it: its kind, and its size or number of blocks, or 0.

    Outputs are stored in the order in which they are made, so that `Output` needs no number.
    """
    if isinstance(op, Hold | TryAlloc | AutotuneAlloc):
        return _KINDS[type(op)], op.size_bytes
    if isinstance(op, Release | ReleaseBeneath):
        return _KINDS[type(op)], op.blocks
    if isinstance(op, Output | Outputs):
        return _KINDS[type(op)], 0
    return OpKind.TRANSIENT, op
