"""Choose the memory format of a convolution's result, as cuDNN's backend does."""

import torch
from torch import Tensor

from planner.capture.meta_kernels.strides import suggests_channels_last

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def backend_memory_format(x: Tensor, weight: Tensor, _backend: object = None) -> torch.memory_format:
    """Return a convolution's result format: channels last if input or weight suggests it, or contiguous.

    In float64 it is always contiguous (cudnn_conv_suggest_memory_format, ATen/native/ConvUtils.h).
    """
    if x.dtype is torch.float64 or not (suggests_channels_last(x) or suggests_channels_last(weight)):
        return torch.contiguous_format
    return _CHANNELS_LAST.get(x.dim(), torch.contiguous_format)
