"""Run operators on `meta`, frequent ones without torch's decompositions in Python.

torch's own meta kernels give the same outputs, but many are decompositions in Python: a multiplication takes
a tenth of a millisecond there and batch norm a whole one, which is most of a capture. Each kernel here gives
tensors of the shape, dtype and strides of torch's, or NotImplemented for a case that it does not cover; tests
hold them against torch's. Where CUDA lays out its results otherwise than torch's meta kernels, the rule is in
`cuda_layouts`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from planner.capture.cuda import rnn
from planner.capture.meta_kernels import creation, cuda_layouts, joining, layers, pointwise, reductions
from planner.program import Phase

aten = torch.ops.aten


def _in_place(*_: Any, **__: Any) -> None:
    """Change the arguments alone; torch has no meta kernel for these operators."""


META_KERNELS: Mapping[Any, Callable[..., Any]] = {
    **pointwise.KERNELS,
    **creation.KERNELS,
    **reductions.KERNELS,
    **joining.KERNELS,
    **layers.KERNELS,
    aten._fused_sgd_.default: _in_place,
    aten._fused_adagrad_.default: _in_place,
    **cuda_layouts.KERNELS,
    **rnn.KERNELS,
}


def run_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], phase: Phase) -> Any:
    """Return the result of an operator in this phase of the loop."""
    kernel = META_KERNELS.get(func)
    if kernel is not None:
        out = kernel(*args, **kwargs)
        if out is not NotImplemented:
            return out
    reads = func is aten._local_scalar_dense.default and args[0].is_meta
    if reads and phase is Phase.OPTIMIZER:
        return 1.0  # optimizers read norms, which decide no memory; step counts are on the CPU
    return func(*args, **kwargs) if kwargs else func(*args)
