"""Select the attention backend for fake tensors as on the planned GPU.

The fake tensors are of torch's compiler. `scaled_dot_product_attention` selects its backend by CUDA code,
which builds of torch without CUDA lack (`_fused_sdp_choice`, ATen/native/transformers/attention.cpp).
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from planner.capture.cuda.operators import attention
from planner.program import Target


@contextmanager
def attention_of(target: Target) -> Iterator[None]:
    """Make attention on fake CUDA tensors select its backend as on the GPU `target` inside the context."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about overridden kernels
            for name, kernel in attention.kernels(target.capability, target.torch).items():
                library.impl(name, kernel, "AutogradCUDA")  # type: ignore[no-untyped-call]
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]
