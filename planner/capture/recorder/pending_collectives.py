"""Keep a collective's tensors alive until the current stream waits for it.

Process groups do the same. A functional collective runs on a stream of NCCL. The tensors that it reads and
writes live until the current stream waits for it (`WorkNCCL::synchronize`,
torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp of 2.13), which happens when its result is first used.
"""

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

_NAMESPACE = "_c10d_functional::"
_WAIT = f"{_NAMESPACE}wait_tensor"
_WRAP = f"{_NAMESPACE}_wrap_tensor_autograd"  # wraps a result that is waited for later


def is_collective(func: Any) -> bool:
    """Return whether an operator starts a functional collective or waits for one."""
    name = func._schema.name
    return bool(name.startswith(_NAMESPACE) and name != _WRAP)


class PendingCollectives:
    """The arguments and results of collectives for which the current stream has not waited yet."""

    def __init__(self) -> None:
        self._held: dict[int, Any] = {}

    def note(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        """Keep the arguments and results of a collective, or release them if `func` waits for it."""
        if func._schema.name == _WAIT:
            self._held.pop(args[0].untyped_storage()._cdata, None)
            return
        for result in tree_leaves(out):
            if isinstance(result, Tensor):
                self._held[result.untyped_storage()._cdata] = args, out
