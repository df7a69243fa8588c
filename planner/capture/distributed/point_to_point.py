"""Sends to other ranks and receives from them, which hold their tensors as NCCL's process group does.

A tensor lives until the current stream waits for the transfer; that of a transfer on its own lives as long
as its work too, as the work's output (`pointToPoint` of ProcessGroupNCCL.cpp in 2.13), while a batch of
transfers is one work without outputs.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, distributed
from torch.distributed import distributed_c10d as c10d

from planner.capture.cuda.names import Replacement


class Transfer:
    """A transfer that is done at once: the work of a process group."""

    def __init__(self, held: tuple[Tensor, ...], outputs: tuple[Tensor, ...] = ()) -> None:
        """Take what lives until the transfer is waited for, and what lives as long as the work."""
        self._held = held
        self._outputs = outputs

    def wait(self, timeout: Any = None) -> bool:
        """Release what is held."""
        self._held = ()
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        """Return that all work is done."""
        return True

    is_success = is_completed

    def result(self) -> list[Tensor]:
        """Return the tensors of a transfer on its own."""
        return list(self._outputs)


def replacements() -> Iterator[Replacement]:
    """Yield what torch.distributed does otherwise: holder, name, and what replaces it."""
    for name in ("isend", "irecv"):
        yield from _in_both(name, _start)
    yield from _in_both("batch_isend_irecv", _start_batch)


def _in_both(name: str, new: Callable[..., Any]) -> Iterator[Replacement]:
    """Yield a replacement in the module of a function, and in the package that shows it."""
    plain = getattr(c10d, name)

    def start(*args: Any, **kwargs: Any) -> Any:
        return new(plain, *args, **kwargs)

    start.__name__ = name
    for holder in (c10d, distributed):
        yield holder, name, start


def _start(plain: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Transfer | None:
    if plain(tensor, *args, **kwargs) is None:  # the rank is in no such group
        return None
    return Transfer((tensor,), (tensor,))


def _start_batch(_: Callable[..., Any], transfers: list[Any]) -> list[Transfer]:
    c10d._check_p2p_op_list(transfers)
    return [Transfer(tuple(transfer.tensor for transfer in transfers))]
