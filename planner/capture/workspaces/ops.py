"""The operations (ops) of a kernel on the allocator, which workspace rules return.

A rule returns a sequence of ops for one call of an operator. A plain number is a block of that many bytes
which is freed before the next op. If the sequence has neither `Output` nor `Outputs`, all outputs are made
before its first op; otherwise outputs that it does not name are made after its last op. Blocks of 0 bytes are
skipped.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from planner.program import Convolution, ConvWorkspace, OpKind, Target

# Returns the provenance of a block by its number; called only for explanations, for which shapes are numbers.
ExplainBlock = Callable[[int], ConvWorkspace]


@dataclass(frozen=True, slots=True)
class KernelOp:
    """One step in a kernel's use of the allocator, such as to hold or to free a block."""

    kind: OpKind
    # Bytes, or the number of blocks to free, of blocks above the block to free, or of outputs to skip.
    number: int = 0
    convolution: Convolution | None = None  # a CONVOLUTION's, whose workspace cuDNN reports
    explain: ExplainBlock | None = field(default=None, compare=False, repr=False)


Hold = partial(KernelOp, OpKind.HOLD)  # a block that lives until it is released or the kernel returns
Keep = partial(KernelOp, OpKind.KEEP)  # a block that is never freed
Release = partial(KernelOp, OpKind.RELEASE)  # frees the given number of held blocks, last allocated first
# Frees the block below the given number of held blocks.
ReleaseBeneath = partial(KernelOp, OpKind.RELEASE_BENEATH)
UseCublas = partial(KernelOp, OpKind.CUBLAS)  # a matrix product, in which cuBLAS may allocate its workspace
Output = partial(KernelOp, OpKind.OUTPUT)  # makes the next output after skipping the given number of outputs
Outputs = partial(KernelOp, OpKind.OUTPUTS)  # makes all outputs that are not made yet

Op = int | KernelOp
Ops = tuple[Op, ...]
Args = tuple[Any, ...]
Rule = Callable[[Args, Any, Target], Ops]  # arguments, result, GPU


def kind_and_size(op: Op) -> tuple[OpKind, Any]:
    """Return the kind and the size of an op, as programs store them.

    The size is a number of bytes or blocks, or a convolution. The number of `Output` is stored as 0, since
    programs store outputs in the order in which they are made.
    """
    if not isinstance(op, KernelOp):
        return OpKind.TRANSIENT, op
    if op.kind is OpKind.CONVOLUTION:
        return op.kind, op.convolution
    return op.kind, 0 if op.kind is OpKind.OUTPUT else op.number


def answer_convolutions(ops: Ops, target: Target) -> Ops:
    """Return `ops` with each convolution replaced by the workspaces that `target` reports."""
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
