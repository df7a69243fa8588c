"""Allocate NCCL's flat buffer for a collective over a list of tensors.

Source: `allgather` and `reduce_scatter` in torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp. Lists of tensors
of different shapes are sent one by one, without a buffer.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from planner.capture.cuda.names import Replacement
from planner.capture.distributed.point_to_point import in_both

_PLACES = {"all_gather": (0, "tensor_list"), "reduce_scatter": (1, "input_list")}  # of the list argument


def replacements() -> Iterator[Replacement]:
    """Yield replacements that hold NCCL's flat buffer during `all_gather` and `reduce_scatter` of lists."""
    for name, place in _PLACES.items():
        yield from in_both(name, partial(_with_buffer, *place))


def _with_buffer(place: int, keyword: str, plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the collective `plain` while a flat buffer of its tensors is allocated.

    The list is the argument at position `place`, or named `keyword`.
    """
    tensors = args[place] if len(args) > place else kwargs.get(keyword)
    buffer = _flat(tensors) if isinstance(tensors, list | tuple) else None
    work = plain(*args, **kwargs)
    del buffer
    return work


def _flat(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return a new tensor as large as all tensors together, or None if their shapes differ."""
    if len({one.shape for one in tensors}) != 1:
        return None
    return tensors[0].new_empty((len(tensors), *tensors[0].shape))
