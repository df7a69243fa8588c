"""Memory of the planned GPU that torch's compiler itself takes: while it times kernels."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from planner.capture.recorder.recorder import Recorder
from planner.program import Category

_OP = "inductor's benchmark"


class GpuMemory:
    """Allocates on the planned GPU, as recorded."""

    def __init__(self, recorder: Recorder, l2_bytes: int) -> None:
        self.recorder = recorder
        self._l2_bytes = l2_bytes

    def allocate(self, size_bytes: int, op: str = _OP) -> Tensor:
        """Return a tensor of as many bytes, which is recorded."""
        with torch.utils._python_dispatch._disable_current_modes():
            tensor = torch.empty(size_bytes, dtype=torch.uint8, device="meta")
        self.recorder.record_tensor(tensor, Category.WORKSPACE, op)
        return tensor

    def time(self, call: Callable[[], Any]) -> None:
        """Allocate what a timed call takes: it runs alone, then many times beside a buffer that flushes the
        L2 cache (InductorBenchmarker.benchmark_gpu, torch/_inductor/runtime/benchmarking.py).
        """
        call()
        buffer = self.allocate(self._l2_bytes)
        call()
        del buffer

    def bytes_below_peak(self) -> int:
        """Return by how much allocated memory may grow before it is higher than it ever was."""
        allocated, peak = self.recorder.allocated_bytes()
        return peak - allocated
