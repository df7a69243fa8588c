"""Record the memory that inductor allocates to decide whether to pad matrix products.

inductor times the products with and without padding. `pad_mm` (torch/_inductor/fx_passes/pad_mm.py) makes
operands of the real sizes on the GPU. Which variant is faster is not known, so products are not padded, as on
the emulated GPU, where nothing takes time.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._inductor.fx_passes import pad_mm
from torch.utils._python_dispatch import _disable_current_modes

from planner.capture.inductor.timing_memory import GpuMemory
from planner.capture.patching import patched


class PaddingTimer:
    """A replacement for inductor's timer that runs matrix products on meta tensors under the recorder."""

    def __init__(self, memory: GpuMemory) -> None:
        self._memory = memory
        self._known: dict[str, object] = {}  # times and decisions by key, as in inductor's cache on disk
        self.count = 0  # number of timed calls

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Make inductor use this timer for matrix products inside the context."""
        cache = pad_mm.get_pad_cache()
        with (
            patched(pad_mm, "get_do_bench", lambda: self._time),
            patched(pad_mm, "is_mm_compute_bound", _is_worth_timing),
            patched(pad_mm, "no_dispatch", self._on_gpu),
            patched(cache, "lookup", self._known.get),
            patched(cache, "set_value", self._keep),
        ):
            yield

    def _keep(self, key: str, value: object) -> None:
        self._known[key] = value

    def _time(self, call: Callable[[], Any]) -> float:
        self.count += 1
        self._memory.time(call)
        return 0.0

    @contextmanager
    def _on_gpu(self) -> Iterator[None]:
        def make(*size: Any, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
            return torch.empty(*size, dtype=dtype, device="meta")

        shown = property(lambda tensor: True)
        with (
            _disable_current_modes(),
            self._memory.recorder,
            patched(torch, "randn", make),
            patched(torch, "randn_like", torch.empty_like),
            patched(Tensor, "is_cuda", shown),
        ):
            yield


def _is_worth_timing(*_: Any) -> bool:
    """Return True, so that inductor times every matrix product.

    inductor's own test returns True if nvidia-smi does not report the clock rates.
    """
    return True
