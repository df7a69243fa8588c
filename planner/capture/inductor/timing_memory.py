"""Record the memory that torch's compiler allocates to time kernels.

The memory is of the planned GPU.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from planner.capture.recorder.recorder import Recorder
from planner.program import Category

_OP = "inductor's benchmark"


class GpuMemory:
    """The memory of the planned GPU, where allocations of torch's compiler are recorded as workspaces."""

    def __init__(self, recorder: Recorder, l2_bytes: int) -> None:
        self.recorder = recorder
        self._l2_bytes = l2_bytes

    def allocate(self, size_bytes: int, op: str = _OP) -> Tensor:
        """Allocate a tensor of `size_bytes` bytes, recorded as a workspace of `op`."""
        with torch.utils._python_dispatch._disable_current_modes():
            tensor = torch.empty(size_bytes, dtype=torch.uint8, device="meta")
        self.recorder.record_tensor(tensor, Category.WORKSPACE, op)
        return tensor

    def time(self, call: Callable[[], Any]) -> None:
        """Run a call twice, as if inductor timed it: alone, then with a buffer that flushes the L2 cache.

        On a GPU the call runs many times with the buffer (InductorBenchmarker.benchmark_gpu,
        torch/_inductor/runtime/benchmarking.py).
        """
        call()
        buffer = self.allocate(self._l2_bytes)
        call()
        del buffer

    def bytes_below_peak(self) -> int:
        """Return how many more bytes can be allocated without a higher peak."""
        allocated, peak = self.recorder.allocated_bytes()
        return peak - allocated
