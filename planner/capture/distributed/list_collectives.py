"""Allocate the flat buffer on which NCCL runs a collective over a list of tensors.

Source: `allgather` and `reduce_scatter` in torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp. Lists of tensors
of several sizes are sent one by one, without a buffer.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, distributed
from torch.distributed import distributed_c10d as c10d

from planner.capture.cuda.names import Replacement

_PLACES = {"all_gather": (0, "tensor_list"), "reduce_scatter": (1, "input_list")}  # of the lists


def replacements() -> Iterator[Replacement]:
    """Yield replacements for the functions of torch.distributed that take lists of tensors."""
    for name, (place, keyword) in _PLACES.items():
        new = _with_buffer(getattr(c10d, name), place, keyword)
        yield c10d, name, new
        yield distributed, name, new


def _with_buffer(plain: Callable[..., Any], place: int, keyword: str) -> Callable[..., Any]:
    @functools.wraps(plain)
    def collect(*args: Any, **kwargs: Any) -> Any:
        tensors = args[place] if len(args) > place else kwargs.get(keyword)
        buffer = _flat(tensors) if isinstance(tensors, list | tuple) else None
        work = plain(*args, **kwargs)
        del buffer
        return work

    return collect


def _flat(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return a tensor as large as all tensors together, beside them, or None if their sizes differ."""
    if len({one.shape for one in tensors}) != 1:
        return None
    return tensors[0].new_empty((len(tensors), *tensors[0].shape))
