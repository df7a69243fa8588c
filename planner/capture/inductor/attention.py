"""Let the compiler's fake tensors take the attention kernels of the planned GPU.

`scaled_dot_product_attention` asks CUDA's code for a backend, which other builds of torch lack
(`_fused_sdp_choice`, ATen/native/transformers/attention.cpp).
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from planner.capture.cuda import attention
from planner.program import Target


@contextmanager
def attention_of(target: Target) -> Iterator[None]:
    """Select the backend as on this GPU while open."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel is overridden
            for name, kernel in attention.kernels(target.capability, target.torch).items():
                library.impl(name, kernel, "AutogradCUDA")  # type: ignore[no-untyped-call]
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]
