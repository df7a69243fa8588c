"""Handle composite operators that are called beneath autograd, where torch does not decompose them.

Inference mode and the `__torch_dispatch__` of a tensor's class call operators beneath autograd.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

# Operators with a composite kernel for all devices and a separate kernel for CUDA, which a build of torch
# without CUDA lacks: benchmarks/fits/composite_operators.py finds them in a build with CUDA (2.13).
COMPOSITE_WITH_CUDA_KERNEL = ("_fused_rms_norm", "mish_backward", "silu_backward")
_KERNELS = frozenset(f"aten::{name}" for name in COMPOSITE_WITH_CUDA_KERNEL)


@cache
def is_composite(func: Any) -> bool:
    """Return whether CUDA runs an operator by other operators, as it runs `reshape` and `to`.

    The schemas of some composites promise a view, though they may copy.
    """
    name = func.name()
    if func._schema.name in _KERNELS or not torch._C._dispatch_has_kernel(
        name
    ):  # prim::device is of TorchScript
        return False
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"))


@contextmanager
def as_without_gradients() -> Iterator[None]:
    """Run operators beneath autograd as under `no_grad` inside the context.

    Autocast's cache of casts is turned off. Beneath autograd the dispatch keys of autograd are left out, at
    which composite operators are decomposed and device-dependent operators are replaced. On CUDA, composite
    operators decompose into the same operators.
    """
    keeps_casts = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.inference_mode(False), torch.no_grad():
            yield
    finally:
        torch.set_autocast_cache_enabled(keeps_casts)
