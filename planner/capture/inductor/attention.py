"""Select the attention backend for fake tensors as on the planned GPU.

The fake tensors are of torch's compiler. `scaled_dot_product_attention` selects its backend by CUDA code,
which builds of torch without CUDA lack (`_fused_sdp_choice`, ATen/native/transformers/attention.cpp).
"""

from contextlib import AbstractContextManager

from planner.capture.cuda.operators import attention
from planner.capture.patching import kernels_registered
from planner.program import Target


def attention_of(target: Target) -> AbstractContextManager[None]:
    """Make attention on fake CUDA tensors use the backend that `target` would choose, inside the context."""
    return kernels_registered(attention.kernels(target.capability, target.torch), "AutogradCUDA")
