"""Trace workspace rules with tensors whose sizes are symbolic."""

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from planner.capture.meta_kernels.strides import is_in_format
from planner.capture.symbolic.sym_int import ShapeEnv, SymInt, as_sym_int
from planner.capture.workspaces.ops import Rule, kind_and_size
from planner.program import BATCH, CONSTANT, SM_COUNT, GuardedOps, OpExpr, OpKind, Target, express_ops

_LEAVES = (BATCH, CONSTANT, SM_COUNT)


class UnsupportedSymTensorOpError(Exception):
    """Raised if a rule uses an operation that symbolic tensors do not support."""


class SymSize(tuple[Any, ...]):
    """A tuple of symbolic sizes with the methods of torch.Size that rules use."""

    def numel(self) -> Any:
        """Return the product of the sizes."""
        return prod(self)

    def __getitem__(self, index: Any) -> Any:
        sizes = tuple.__getitem__(self, index)
        return SymSize(sizes) if isinstance(index, slice) else sizes


class SymTensor:
    """A tensor with symbolic sizes and strides, and the attributes of Tensor that rules use."""

    is_meta = True
    is_cpu = False  # rules cannot be traced with CPU tensors
    __class__ = Tensor  # type: ignore[assignment]  # rules distinguish tensors from None by it

    def __init__(self, sizes: Iterable[Any], strides: Iterable[Any], dtype: torch.dtype) -> None:
        self.shape, self._strides, self.dtype = SymSize(sizes), tuple(strides), dtype

    def stride(self, dim: int | None = None) -> Any:
        """Return the stride of the dimension `dim`, or all strides if `dim` is None."""
        return self._strides if dim is None else self._strides[dim]

    def dim(self) -> int:
        """Return the number of dimensions."""
        return len(self.shape)

    def numel(self) -> Any:
        """Return the number of elements."""
        return self.shape.numel()

    def element_size(self) -> int:
        """Return the bytes of an element."""
        return self.dtype.itemsize

    def is_contiguous(self) -> bool:
        """Return whether the tensor is empty, or has the strides of a contiguous tensor."""
        return bool(self.numel() == 0) or is_in_format(self.shape, self._strides, is_last=False)

    def transpose(self, a: int, b: int) -> "SymTensor":
        """Return a view of the tensor with two dimensions exchanged."""
        order = list(range(self.dim()))
        order[a], order[b] = order[b], order[a]
        return SymTensor([self.shape[d] for d in order], [self._strides[d] for d in order], self.dtype)

    def t(self) -> "SymTensor":
        """Return the transpose of a matrix."""
        return self.transpose(0, 1)

    def expand(self, shape: Sequence[Any]) -> "SymTensor":
        """Return a view of the tensor in a shape to which its own can be broadcast."""
        lead = len(shape) - self.dim()
        sizes = zip(self.shape, self._strides, shape[lead:], strict=True)
        strides = [stride if size == whole else 0 for size, stride, whole in sizes]
        return SymTensor(list(shape), [*[0] * lead, *strides], self.dtype)

    def reshape(self, *sizes: int) -> "SymTensor":
        """Return a one-dimensional tensor with all elements.

        `sizes` must be (-1,). Raises UnsupportedSymTensorOpError otherwise. Only the rules of sorting
        reshape.
        """
        if sizes != (-1,):
            raise UnsupportedSymTensorOpError(f"reshape{sizes}")
        return SymTensor([self.numel()], [1], self.dtype)

    def __getattr__(self, name: str) -> Any:
        """Raise UnsupportedSymTensorOpError for an unsupported attribute."""
        raise UnsupportedSymTensorOpError(name)


def trace_rule(rule: Rule, args: Any, out: Any, target: Target, env: ShapeEnv) -> GuardedOps:
    """Run a workspace rule on symbolic arguments, and return its operations as expressions with guards.

    The expressions hold if all guards hold. The operator's arguments and result consist of symbolic integers
    of `env`. Raises UnsupportedSymTensorOpError if symbolic tensors cannot follow the rule.
    """
    sm_count = SymInt(env, target.sm_count, None, env.place((SM_COUNT, 0, 0)))
    steps = rule(args, out, Target(target.capability, sm_count, torch=target.torch))  # type: ignore[arg-type]
    ops = express_ops(tuple(map(kind_and_size, steps)), lambda size: as_sym_int(env, size).place())
    return _pruned(GuardedOps(env.min_batch, env.max_batch, tuple(env.nodes), tuple(env.guards), *ops))


def _pruned(variant: GuardedOps) -> GuardedOps:
    """Return a copy with only the nodes that guards or operations need."""
    needed = {place for guard in variant.guards for place in (guard.left, guard.right)}
    needed |= {op.node for op in variant.ops if op.kind is not OpKind.CONVOLUTION}
    needed |= {node for convolution in variant.convolutions for node in convolution.nodes}
    for place in range(len(variant.nodes) - 1, -1, -1):
        operation, a, b = variant.nodes[place]
        if place in needed and operation not in _LEAVES:
            needed |= {a, b}
    places = {old: new for new, old in enumerate(sorted(needed))}
    nodes = tuple(
        (operation, a, b) if operation in _LEAVES else (operation, places[a], places[b])
        for operation, a, b in (variant.nodes[old] for old in sorted(needed))
    )
    guards = tuple(
        replace(guard, left=places[guard.left], right=places[guard.right]) for guard in variant.guards
    )
    ops = tuple(
        op if op.kind is OpKind.CONVOLUTION else OpExpr(op.kind, places[op.node]) for op in variant.ops
    )
    convolutions = tuple(convolution.moved(places) for convolution in variant.convolutions)
    return replace(variant, nodes=nodes, guards=guards, ops=ops, convolutions=convolutions)
