"""Operations of a kernel on the allocator, in the order in which a workspace rule lists them.

A rule gives a sequence of ops for one call of an operator. A plain number is a block of so many bytes that is
freed before the next op. A rule without `Output` and `Outputs` has all outputs made before its first op;
outputs that it does not name are made after its last. Blocks of no bytes are skipped.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from planner.program import Convolution, ConvWorkspace, OpKind, Target

# Returns the provenance of the block of this number; called for explanations alone, where shapes are numbers.
ExplainBlock = Callable[[int], ConvWorkspace]


@dataclass(frozen=True, slots=True)
class KernelOp:
    """An operation of a kernel."""

    kind: OpKind
    number: int = 0  # of bytes, of blocks to free or beneath which one is freed, or of outputs to skip
    convolution: Convolution | None = None  # for which a library answers
    explain: ExplainBlock | None = field(default=None, compare=False, repr=False)


Hold = partial(KernelOp, OpKind.HOLD)  # a block that lives until it is released or the kernel returns
Keep = partial(KernelOp, OpKind.KEEP)  # a block that is never freed
Release = partial(KernelOp, OpKind.RELEASE)  # of the held blocks that were allocated last
ReleaseBeneath = partial(KernelOp, OpKind.RELEASE_BENEATH)  # of the one so many beneath the last one
UseCublas = partial(KernelOp, OpKind.CUBLAS)  # the first product, where cuBLAS may take its workspace
Output = partial(KernelOp, OpKind.OUTPUT)  # the next output, or as many further on as are skipped
Outputs = partial(KernelOp, OpKind.OUTPUTS)  # all outputs that are not made yet

Op = int | KernelOp
Ops = tuple[Op, ...]
Args = tuple[Any, ...]
Rule = Callable[[Args, Any, Target], Ops]  # arguments, result, GPU


def kind_and_size(op: Op) -> tuple[OpKind, Any]:
    """Return an op as programs store it: its kind, and its size or number of blocks, its convolution, or 0.

    Outputs are stored in the order in which they are made, so that `Output` needs no number.
    """
    if not isinstance(op, KernelOp):
        return OpKind.TRANSIENT, op
    if op.kind is OpKind.CONVOLUTION:
        return op.kind, op.convolution
    return op.kind, 0 if op.kind is OpKind.OUTPUT else op.number


def answer_convolutions(ops: Ops, target: Target) -> Ops:
    """Return the ops with the workspaces that the target's library answers for convolutions."""
    return tuple(answered for op in ops for answered in _answer(op, target))


def _answer(op: Op, target: Target) -> Iterator[Op]:
    if not isinstance(op, KernelOp) or op.convolution is None:
        yield op
        return
    answer = target.conv_workspaces(op.convolution)
    if answer.searched_bytes:
        explain = partial(
            ConvWorkspace.from_query, query=op.convolution, engine=answer.searched, searched=True
        )
        yield KernelOp(OpKind.AUTOTUNE, answer.searched_bytes, explain=explain)
    if answer.workspace_bytes:
        explain = partial(
            ConvWorkspace.from_query, query=op.convolution, engine=answer.engine, searched=False
        )
        yield KernelOp(OpKind.TRY, answer.workspace_bytes, explain=explain)
