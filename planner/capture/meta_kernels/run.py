"""Run operators on `meta`, with outputs laid out as by CUDA's kernels.

torch's meta kernels are mostly decompositions in Python: a multiplication takes a tenth of a millisecond
there, batch norm a whole one. A training loop calls each operator many times with the same sizes, so the
layout of its outputs is computed once. Kernels of our own stand for the most frequent operators (`pointwise`)
and for those whose outputs CUDA lays out otherwise (`cuda_layouts`, `convolution`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from planner.capture.cuda import rnn
from planner.capture.meta_kernels import bitsandbytes, collectives, convolution, cuda_layouts, pointwise
from planner.capture.meta_kernels.strides import empty_strided, is_contiguous_meta
from planner.capture.operator_table import operator_table
from planner.program import Capability, Phase

aten = torch.ops.aten

_KERNELS: Mapping[Any, Callable[..., Any]] = operator_table(
    {**pointwise.KERNELS, **cuda_layouts.KERNELS, **rnn.KERNELS}
)
_Layout = tuple[Sequence[int], Sequence[int], torch.dtype]  # shape and strides


def meta_kernels(capability: Capability) -> Mapping[Any, Callable[..., Any]]:
    """Return our kernels by operator, as they are on a GPU of this compute capability."""
    return {
        **_KERNELS,
        **operator_table(convolution.kernels(capability)),
        **bitsandbytes.kernels(),
        **collectives.kernels(),
    }


class MetaRunner:
    """Runs the operators of one capture."""

    def __init__(self, capability: Capability) -> None:
        self._kernels = meta_kernels(capability)
        self._layouts: dict[Any, tuple[type, list[_Layout | None]]] = {}  # of outputs, with their container
        self._in_place: set[Any] = set()  # calls that return their first argument

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], phase: Phase) -> Any:
        """Return the result of an operator in this phase of the loop."""
        kernel = self._kernels.get(func)
        if kernel is not None:
            out = kernel(*args, **kwargs)
            if out is not NotImplemented:
                return out
        if func is aten._local_scalar_dense.default and args[0].is_meta and phase is Phase.OPTIMIZER:
            return 1.0  # optimizers read norms, which decide no memory; step counts are on the CPU
        if _changes_lists(func) and args[0] and args[0][0].is_meta:
            return None
        if _changes_one_tensor(func, args):
            return args[0]
        key = _key_of((func, torch.get_default_dtype(), args, *kwargs.items()))
        if key in self._in_place:
            return args[0]
        if key in self._layouts:
            kind, layouts = self._layouts[key]
            made = [None if layout is None else empty_strided(*layout) for layout in layouts]
            return made[0] if kind is Tensor else kind(made)
        out = func(*args, **kwargs) if kwargs else func(*args)
        if key is not None:
            self._remember(key, func, args, kwargs, out)
        return out

    def _remember(self, key: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Store the layout of outputs that are new tensors, or that an argument was changed in place."""
        if args and out is args[0] and torch.Tag.inplace_view not in func.tags:
            self._in_place.add(key)
        returns = func._schema.returns
        if not returns or any(value.alias_info is not None for value in returns):
            return
        outputs = list(out) if isinstance(out, tuple | list) else [out]
        layouts: list[_Layout | None] = []
        storages = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
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
        self._layouts[key] = type(out), layouts


def _changes_lists(func: Any) -> bool:
    """Return whether an operator changes lists of tensors in place and returns nothing."""
    schema = func._schema
    return not schema.returns and schema.name.startswith(("aten::_foreach_", "aten::_fused_"))


def _changes_one_tensor(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether a call changes the elements of its only tensor in place."""
    name = func._schema.name
    if not name.endswith("_") or "resize" in name or torch.Tag.inplace_view in func.tags:
        return False
    is_alone = is_contiguous_meta(args[0]) and not any(isinstance(one, Tensor) for one in args[1:])
    return is_alone and bool(args[0].dtype.is_floating_point)


def _key_of(value: Any) -> Any:
    """Return a key that determines the layout of a call's outputs; None where values may decide it."""
    if isinstance(value, Tensor):
        return (value.shape, value.stride(), value.dtype) if value.is_meta else None
    if isinstance(value, tuple | list):
        keys = tuple(map(_key_of, value))
        return None if None in keys else keys
    return type(value), value  # 1, 1.0 and True promote differently
