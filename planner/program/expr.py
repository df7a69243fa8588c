"""Integer expressions in the batch size and the number of SMs, with guards.

The expressions hold only if all guards hold. A workspace rule of `planner.capture.workspaces` computes in
Python, from the shapes of tensors, how much memory a kernel takes. Run once with symbolic integers
(`planner.capture.symbolic.sym_int`), it yields a `GuardedOps`: expressions for its results, and each
comparison that it made as a guard. For a batch size at which all guards hold, the rule would take the same
branches, so the expressions give its results. For any other batch size they give nothing.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec import Struct

from planner.program.kernels.convolution import Convolution, ConvolutionExpr
from planner.program.kernels.expansion import OpenKernelOps, OpKind

Node = tuple[str, int, int]  # an operation and its operands: indices of earlier nodes, or the number of a "c"

BATCH, SM_COUNT, CONSTANT = "b", "m", "c"
CONVOLUTION = OpKind.CONVOLUTION
_LONGEST_SHIFT = 64
_MOST_BITS = 128


def _bits(a: int, b: int) -> int:
    return a.bit_length()


def _shifted(a: int, b: int) -> int:
    return a << min(max(b, 0), _LONGEST_SHIFT)


OPERATIONS: Mapping[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
    "%": operator.mod,
    "l": _shifted,
    "n": _bits,
}
COMPARISONS: Mapping[str, Callable[[int, int], bool]] = {
    "<": operator.lt,
    "L": operator.le,
    "=": operator.eq,
}


class Guard(Struct, frozen=True):
    """A comparison of two nodes, and the result that it must have for the expressions to be valid."""

    comparison: str
    left: int
    right: int
    expected: bool


class OpExpr(Struct, frozen=True):
    """A kernel's operation on the allocator, with an expression for its size.

    `node` is the index of the node of its bytes or blocks, or of the convolution if `kind` is CONVOLUTION.
    """

    kind: OpKind
    node: int


class GuardedOps(Struct, frozen=True):
    """The operations of a kernel as expressions, valid in a range of batch sizes if all guards hold."""

    min_batch: int
    max_batch: int
    nodes: tuple[Node, ...]
    guards: tuple[Guard, ...]
    ops: tuple[OpExpr, ...]
    convolutions: tuple[ConvolutionExpr, ...] = ()

    @property
    def depends_on_sm_count(self) -> bool:
        """Return whether any expression contains the number of SMs."""
        return any(operation == SM_COUNT for operation, _, _ in self.nodes)


def constant_ops(ops: OpenKernelOps, batch: int, sm_count: int) -> GuardedOps:
    """Convert concrete operations to constant expressions, valid only for `batch` and `sm_count`."""
    nodes: list[Node] = [(SM_COUNT, 0, 0), (CONSTANT, sm_count, 0)]

    def node_of(number: int) -> int:
        nodes.append((CONSTANT, number, 0))
        return len(nodes) - 1

    exprs, convolutions = express_ops(ops, node_of)
    return GuardedOps(batch, batch, tuple(nodes), (Guard("=", 0, 1, True),), exprs, convolutions)


def express_ops(
    ops: OpenKernelOps, node_of: Callable[[int], int]
) -> tuple[tuple[OpExpr, ...], tuple[ConvolutionExpr, ...]]:
    """Convert concrete operations and their convolutions to expressions.

    `node_of` returns the index of the node for a number.
    """
    exprs: list[OpExpr] = []
    convolutions: list[ConvolutionExpr] = []
    for kind, number in ops:
        if isinstance(number, Convolution):
            exprs.append(OpExpr(kind, len(convolutions)))
            convolutions.append(ConvolutionExpr.of(number, node_of))
        else:
            exprs.append(OpExpr(kind, node_of(number)))
    return tuple(exprs), tuple(convolutions)


def evaluate(variant: GuardedOps, batch: int, sm_count: int) -> OpenKernelOps | None:
    """Return a variant's operations at a batch size and number of SMs, or None if it does not hold there."""
    if not variant.min_batch <= batch <= variant.max_batch:
        return None
    if not variant.ops and not variant.guards:
        return ()
    values = _values(variant.nodes, batch, sm_count)
    if values is None:
        return None
    for guard in variant.guards:
        if COMPARISONS[guard.comparison](values[guard.left], values[guard.right]) is not guard.expected:
            return None
    return tuple(
        (op.kind, variant.convolutions[op.node].at(values) if op.kind is CONVOLUTION else values[op.node])
        for op in variant.ops
    )


def first_matching(variants: Iterable[GuardedOps], batch: int, sm_count: int) -> OpenKernelOps | None:
    """Return the operations of the first variant that holds at a batch size and number of SMs, else None."""
    results = (evaluate(variant, batch, sm_count) for variant in variants)
    return next((ops for ops in results if ops is not None), None)


def _values(nodes: Sequence[Node], batch: int, sm_count: int) -> list[int] | None:
    """Return the value of each node, or None if a node cannot be computed.

    A node cannot be computed if it divides by zero or exceeds `_MOST_BITS` bits. Both can happen only with
    nodes that were read from a file.
    """
    values: list[int] = []
    for operation, a, b in nodes:
        if operation == CONSTANT:
            values.append(a)
        elif operation == BATCH:
            values.append(batch)
        elif operation == SM_COUNT:
            values.append(sm_count)
        else:
            if operation in "/%" and not values[b]:
                return None
            value = OPERATIONS[operation](values[a], values[b])
            if value.bit_length() > _MOST_BITS:
                return None
            values.append(value)
    return values


def validate_ops(variant: GuardedOps) -> None:
    """Raise ValueError if a variant is inconsistent.

    Its operations must be known, and each operand must be an earlier node.
    """
    for place, (operation, a, b) in enumerate(variant.nodes):
        if operation in OPERATIONS:
            if not (0 <= a < place and 0 <= b < place):
                raise ValueError(f"node {place} precedes its operands")
        elif operation not in (BATCH, SM_COUNT, CONSTANT):
            raise ValueError(f"node {place}: unknown operation {operation!r}")
    places = range(len(variant.nodes))
    for guard in variant.guards:
        if guard.comparison not in COMPARISONS or guard.left not in places or guard.right not in places:
            raise ValueError(f"invalid comparison: {guard}")
    of_convolutions = range(len(variant.convolutions))
    if any(op.node not in (of_convolutions if op.kind is CONVOLUTION else places) for op in variant.ops):
        raise ValueError("an operation without its node")
    if any(node not in places for convolution in variant.convolutions for node in convolution.nodes):
        raise ValueError("a convolution without its sizes")
