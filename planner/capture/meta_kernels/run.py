"""Run operators on meta tensors.

Outputs are laid out as by CUDA's kernels. torch's meta kernels are mostly decompositions in Python: a
multiplication takes a tenth of a millisecond, batch norm a whole millisecond. A training loop calls each
operator many times with the same sizes, so the layout of its outputs is computed once. The planner has
kernels for the most frequent operators (`pointwise`) and for operators whose outputs CUDA lays out
differently (`cuda_layouts`, `convolution`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor

from planner.capture.arguments import leaves_of
from planner.capture.cuda.operators import rnn
from planner.capture.meta_kernels import (
    bitsandbytes,
    collectives,
    convolution,
    cuda_layouts,
    operand_dtypes,
    pointwise,
    positions,
)
from planner.capture.meta_kernels.calls import call_operator
from planner.capture.meta_kernels.strides import empty_strided, is_contiguous_meta
from planner.capture.operator_table import operator_table
from planner.program import Capability, Phase

aten = torch.ops.aten


def _scaled_mm_out(*operands: Any, out: Tensor, **_: Any) -> Tensor:
    """Return `out` unchanged. torch has no meta kernels for products of FP8 with an output argument."""
    return out


_KERNELS: Mapping[Any, Callable[..., Any]] = operator_table(
    {
        **pointwise.KERNELS,
        **cuda_layouts.KERNELS,
        **rnn.KERNELS,
        **positions.KERNELS,
        "_scaled_mm.out _scaled_mm_v2.out": _scaled_mm_out,
    }
)
_SEQUENCES = (tuple, list)
_Layout = tuple[Sequence[int], Sequence[int], torch.dtype]  # shape, strides and dtype


def meta_kernels(capability: Capability) -> Mapping[Any, Callable[..., Any]]:
    """Return the planner's meta kernels by operator, for GPUs of a compute capability."""
    return {
        **_KERNELS,
        **operator_table(convolution.kernels(capability)),
        **bitsandbytes.kernels(),
        **collectives.kernels(),
    }


class _Operator(Struct, frozen=True):
    """An operator, the planner's kernel and check for it, and whether it works in place.

    These properties are cached, since torch looks them up slowly.
    """

    func: Any  # kept alive, so that its `id` stays unique
    kernel: Callable[..., Any] | None  # the planner's meta kernel; None if there is no such kernel
    check: Callable[[tuple[Any, ...]], None] | None  # raises if CUDA's kernel refuses the operands
    changes_lists: bool  # see `_changes_lists`
    changes_elements: bool  # see `_changes_elements`


class MetaRunner:
    """A runner of one capture's operators on meta tensors. It remembers the layouts of outputs."""

    def __init__(self, capability: Capability) -> None:
        self._kernels = meta_kernels(capability)
        self._operators: dict[int, _Operator] = {}  # by `id`, since hashing an operator is slow
        self._layouts: dict[Any, tuple[type, list[_Layout | None]]] = {}  # of outputs, with their type
        self._in_place: set[Any] = set()  # calls that return their first argument

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], phase: Phase) -> Any:
        """Run an operator on meta tensors and return its result. `phase` is the current phase of the loop."""
        op = self._operators.get(id(func)) or self._inspect(func)
        if op.check is not None:
            op.check(args)
        if op.kernel is not None:
            out = op.kernel(*args, **kwargs)
            if out is not NotImplemented:
                return out
        if func is aten._local_scalar_dense.default and args[0].is_meta and phase is Phase.OPTIMIZER:
            return 1.0  # optimizers read norms, which decide no memory; step counts are on the CPU
        if op.changes_lists and args[0] and args[0][0].is_meta:
            return None
        if op.changes_elements and _is_only_tensor(args):
            return args[0]
        key = _key_of((id(func), torch.get_default_dtype(), args, *kwargs.items()))
        if key in self._in_place:
            return args[0]
        known = self._layouts.get(key)
        if known is not None:
            kind, layouts = known
            made = [None if layout is None else empty_strided(*layout) for layout in layouts]
            return made[0] if kind is Tensor else kind(made)
        out = call_operator(func, args, kwargs)
        if key is not None:
            self._remember(key, func, args, kwargs, out)
        return out

    def _inspect(self, func: Any) -> _Operator:
        kernel, check = self._kernels.get(func), operand_dtypes.find_check(func)
        op = _Operator(func, kernel, check, _changes_lists(func), _changes_elements(func))
        self._operators[id(func)] = op
        return op

    def _remember(self, key: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Remember the layouts of a call's outputs for later equal calls.

        Outputs that share an argument's storage are not remembered. If the call returns its first argument,
        that is remembered instead.
        """
        if args and out is args[0] and torch.Tag.inplace_view not in func.tags:
            self._in_place.add(key)
        returns = func._schema.returns
        if not returns or any(value.alias_info is not None for value in returns):
            return
        outputs = list(out) if isinstance(out, tuple | list) else [out]
        layouts: list[_Layout | None] = []
        storages = {t.untyped_storage()._cdata for t in leaves_of(args, kwargs) if isinstance(t, Tensor)}
        for t in outputs:
            if t is None:
                layouts.append(None)
                continue
            if not isinstance(t, Tensor) or not t.is_meta or t.untyped_storage()._cdata in storages:
                return
            layout = t.shape, t.stride(), t.dtype
            if t.untyped_storage().nbytes() != empty_strided(*layout).untyped_storage().nbytes():
                return
            layouts.append(layout)
        self._layouts[key] = Tensor if isinstance(out, Tensor) else type(out), layouts


def _changes_lists(func: Any) -> bool:
    """Return whether an operator only changes lists of tensors in place. Such an operator returns nothing."""
    schema = func._schema
    return not schema.returns and schema.name.startswith(("aten::_foreach_", "aten::_fused_"))


def _changes_elements(func: Any) -> bool:
    """Return whether an operator changes its first tensor in place, but not the tensor's size or strides."""
    name = func._schema.name
    return name.endswith("_") and "resize" not in name and torch.Tag.inplace_view not in func.tags


def _is_only_tensor(args: tuple[Any, ...]) -> bool:
    """Return whether the first argument is a contiguous floating-point meta tensor, and the only tensor."""
    is_alone = is_contiguous_meta(args[0]) and not any(isinstance(one, Tensor) for one in args[1:])
    return is_alone and bool(args[0].dtype.is_floating_point)


def _key_of(value: Any) -> Any:
    """Return a cache key for a call or an argument, or None if values of tensors may decide output layouts.

    Calls with equal keys have outputs of equal layouts.
    """
    if isinstance(value, Tensor):
        return (value.shape, value.stride(), value.dtype) if value.is_meta else None
    if isinstance(value, _SEQUENCES):
        keys = tuple(map(_key_of, value))
        return None if None in keys else keys
    return type(value), value  # 1, 1.0 and True promote differently
