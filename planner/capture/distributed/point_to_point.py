"""Replace sends and receives between ranks.

Tensors are held as long as by NCCL's process group. A transfer's tensor lives until the current stream waits
for the transfer. The tensor of a single transfer is also an output of its work object and lives as long as
the object (`pointToPoint` of ProcessGroupNCCL.cpp in 2.13). A batch of transfers is one work object without
outputs.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, distributed
from torch.distributed import distributed_c10d as c10d

from planner.capture.cuda.names import Replacement


class Transfer:
    """The work object of a finished transfer, which keeps its tensors alive."""

    def __init__(self, held: tuple[Tensor, ...], outputs: tuple[Tensor, ...] = ()) -> None:
        """Keep the tensors `held` alive until `wait` is called, and `outputs` as long as the object lives."""
        self._held = held
        self._outputs = outputs

    def wait(self, timeout: Any = None) -> bool:
        """Release the held tensors, and return True."""
        self._held = ()
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        """Return True, since the transfer is done."""
        return True

    is_success = is_completed

    def result(self) -> list[Tensor]:
        """Return a list of a single transfer's tensor, or [] for a batch of transfers."""
        return list(self._outputs)


def replacements() -> Iterator[Replacement]:
    """Yield replacements for `isend`, `irecv` and `batch_isend_irecv`, which give `Transfer` objects."""
    for name in ("isend", "irecv"):
        yield from in_both(name, _start)
    yield from in_both("batch_isend_irecv", _start_batch)


def in_both(name: str, new: Callable[..., Any]) -> Iterator[Replacement]:
    """Yield replacements for the function `name` in torch.distributed and its module distributed_c10d.

    `new` is called with the original function, followed by the arguments.
    """
    plain = getattr(c10d, name)

    def start(*args: Any, **kwargs: Any) -> Any:
        return new(plain, *args, **kwargs)

    start.__name__ = name
    for holder in (c10d, distributed):
        yield holder, name, start


def _start(plain: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Transfer | None:
    if plain(tensor, *args, **kwargs) is None:  # the rank is not in the group
        return None
    return Transfer((tensor,), (tensor,))


def _start_batch(_: Callable[..., Any], transfers: list[Any]) -> list[Transfer]:
    c10d._check_p2p_op_list(transfers)
    return [Transfer(tuple(transfer.tensor for transfer in transfers))]
