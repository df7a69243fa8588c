"""Plan the optimizers of bitsandbytes and torchao.

They use memory outside the caching allocator. bitsandbytes keeps paged state in CUDA managed memory, and
reads overrides for single parameters from a manager that is global to the process. torchao keeps parameters,
gradients and state on the host, and compiles its steps (`torchao_optimizers`).
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from planner.capture.cuda.optimizers import torchao as torchao_optimizers
from planner.capture.cuda.optimizers.outside_memory import OutsideMemory
from planner.capture.patching import patched
from planner.errors import UsageError

# bitsandbytes/backends/cuda/ops.py, `str2optimizer8bit_blockwise`
_BLOCKWISE = frozenset(("adam", "momentum", "rmsprop", "lion", "adagrad", "ademamix"))


@contextmanager
def optimizer_libraries(capability: tuple[int, int]) -> Iterator[OutsideMemory]:
    """Replace functions of bitsandbytes and torchao; yield a counter of memory outside the allocator.

    Libraries that are not imported are left alone. The steps are run as on a GPU of this compute capability.
    """
    outside = OutsideMemory()
    with ExitStack() as stack:
        if "bitsandbytes.optim" in sys.modules:
            _watch_bitsandbytes(outside, stack)
        if "torchao.optim" in sys.modules:
            torchao_optimizers.watch(outside, stack, capability)
        yield outside


def _watch_bitsandbytes(outside: OutsideMemory, stack: ExitStack) -> None:
    """Replace bitsandbytes' functions until the stack closes, so that paged state is counted in `outside`.

    Paged state is not recorded as allocated (bitsandbytes/functional.py, `get_paged`).
    """
    functional, manager = sys.modules["bitsandbytes.functional"], sys.modules["bitsandbytes.optim.optimizer"]

    def get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> Tensor:
        with _disable_current_modes():
            out = torch.empty(shape, dtype=dtype, device="meta")
        outside.paged_bytes += prod(shape) * dtype.itemsize
        out.is_paged, out.page_deviceid = True, 0  # type: ignore[attr-defined]
        return out

    update_32bit, update_8bit = functional.optimizer_update_32bit, functional.optimizer_update_8bit_blockwise

    def update_with_norm(
        name: str, g: Tensor, p: Tensor, *args: Any, max_unorm: float = 0.0, **rest: Any
    ) -> None:
        """Run bitsandbytes' 32-bit update, with the parameter's norm allocated before if `max_unorm` > 0.

        The kernel gets the norm as a number.
        """
        norm = torch.norm(p.data.float()) if max_unorm > 0.0 else None
        update_32bit(name, g, p, *args, **rest)
        del norm

    def update_blockwise(name: str, *args: Any, **rest: Any) -> None:
        if name not in _BLOCKWISE:
            raise UsageError(
                f"--optimizer: bitsandbytes has no 8-bit kernel of {name} on CUDA; take the 32-bit optimizer"
            )
        update_8bit(name, *args, **rest)

    for name, replacement in (
        ("optimizer_update_32bit", update_with_norm),
        ("optimizer_update_8bit_blockwise", update_blockwise),
        ("get_paged", get_paged),
        ("fill", lambda *_, **__: None),
        ("prefetch_tensor", lambda *_, **__: None),
    ):
        stack.enter_context(patched(functional, name, replacement))
    stack.enter_context(_overrides_kept(manager.GlobalOptimManager))


@contextmanager
def _overrides_kept(manager: Any) -> Iterator[None]:
    """Restore bitsandbytes' global settings for single parameters when the context closes.

    Its `check_overrides` adds entries under the `id` of parameters.
    """
    one = manager._instance
    names = ("pid2config", "index2config", "module_weight_config_triple")
    before = {} if one is None else {name: getattr(one, name).copy() for name in names}
    try:
        yield
    finally:
        manager._instance = one
        for name, value in before.items():
            setattr(one, name, value)
