"""Apply CUDA's autocast to recurrent layers.

The source is cudnn/AutocastRNN.cpp. The weights are copied into a new flat buffer at each call, without the
cache of casts, so that autograd sees the copy; the copies are float16 whatever dtype the region names.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from planner.capture.cuda.autocast.mode import KEYS, CastCache, is_eligible
from planner.capture.workspaces.nn.rnn import RnnSizes

aten = torch.ops.aten


def kernels(cache: CastCache) -> dict[str, Callable[..., Any]]:
    """Return {"_cudnn_rnn": kernel}; the kernel casts tensors to float16, as CUDA's autocast does.

    The kernel is for the dispatch key of CUDA's autocast.
    """

    def run(
        x: Tensor, weight: Sequence[Tensor], weight_stride0: int, buffer: Tensor | None, hx: Tensor,
        cx: Tensor | None, mode: int, hidden: int, projected: int, layers: int, batch_first: bool, p: float,
        train: bool, bidirectional: bool, batch_sizes: Sequence[int], dropout: Tensor | None = None,
    ) -> Any:  # fmt: skip
        with torch._C._ExcludeDispatchKeyGuard(KEYS):
            given = weight[0] if buffer is None else buffer
            if is_eligible(given) and given.dtype is not torch.float16:
                sizes = RnnSizes(mode, x.shape[-1], hidden, projected, layers, bidirectional)
                buffer, weight = _flattened(weight, sizes.weight_elements())
            cx = None if cx is None else cache.cast(cx, torch.float16)  # from the last argument to the first
            hx = cache.cast(hx, torch.float16)
            x = cache.cast(x, torch.float16)
            return aten._cudnn_rnn(
                x, weight, weight_stride0, buffer, hx, cx, mode, hidden, projected, layers, batch_first, p,
                train, bidirectional, batch_sizes, dropout,
            )  # fmt: skip

    return {"_cudnn_rnn": run}


def _flattened(weights: Sequence[Tensor], elements: int) -> tuple[Tensor, list[Tensor]]:
    """Return a new float16 buffer of `elements` elements, and float16 copies of the weights inside it.

    Each copy shares the buffer's storage but is no view of it to autograd (`get_parameters` of
    cudnn/RNN.cpp makes them by `set_`), so that each weight has a separate gradient.
    """
    buffer = torch.zeros(elements, dtype=torch.float16, device=weights[0].device)
    copies, offset = [], 0
    for weight in weights:
        copy = torch.empty(0, dtype=torch.float16, device=weight.device)
        with torch.no_grad():
            copy.set_(buffer.untyped_storage(), offset, weight.shape, weight.stride())
        copies.append(copy.copy_(weight))
        offset += weight.numel()
    return buffer, copies
