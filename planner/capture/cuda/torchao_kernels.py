"""Replace kernels that torchao has only if Triton finds a GPU."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor

from planner.capture.patching import patched

_MIXED = "torchao.prototype.quantized_training.int8_mixed_precision"
_PRODUCT = "torchao.kernel.intmm"
_CACHE_BYTES = 256 * 2**20  # of a buffer that Triton clears between timed runs (backends/nvidia/driver.py)


@contextmanager
def torchao_kernels() -> Iterator[None]:
    """Replace torchao's INT8 products inside the context by functions that allocate as on a GPU.

    Only modules of torchao that are imported already are changed.
    """
    with ExitStack() as stack:
        if _PRODUCT in sys.modules:  # out_dtype_dense of torch/_higher_order_ops/out_dtype.py
            stack.enter_context(patched(sys.modules[_PRODUCT], "out_dtype", _int_mm))
        if _MIXED in sys.modules:
            stack.enter_context(patched(sys.modules[_MIXED], "scaled_int8_mm", _TimedProduct()))
        yield


def _int_mm(operator: object, dtype: object, first: Tensor, second: Tensor) -> Tensor:
    return torch._int_mm(first, second)


class _TimedProduct:
    """The stand-in for torchao's scaled INT8 product, which Triton autotunes.

    The product has row and column scales, and is in prototype/quantized_training/int8_mm.py.
    """

    def __init__(self) -> None:
        self._timed: set[tuple[object, ...]] = set()

    def __call__(self, first: Tensor, second: Tensor, row_scale: Tensor, col_scale: Tensor) -> Tensor:
        """Return an empty tensor for the product; new sizes or strides first allocate the autotuner's buffer.

        The buffer is freed at once.
        """
        product = row_scale.new_empty(first.shape[0], second.shape[1])
        key = (*first.shape, second.shape[1], first.stride(1), second.stride(0))
        if key not in self._timed:
            self._timed.add(key)
            torch.empty(_CACHE_BYTES, dtype=torch.uint8, device=first.device)
        return product
