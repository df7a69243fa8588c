"""Hold the projections of `nn.MultiheadAttention` as torch before 2.12 does.

Since 2.12, `multi_head_attention_forward` deletes query, key and value once they are used
(pytorch/pytorch#178452). Before, they live until it returns, which counts where autograd does not save them:
without gradients, as in the first pass of a checkpoint.
"""

import dis
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from torch.nn import functional as F

from planner.program import TorchVersion

_DELETED_SINCE: TorchVersion = (2, 12)
_attend = F.multi_head_attention_forward


def patches(version: TorchVersion) -> Iterator[tuple[str, object]]:
    """Yield the name and the replacement of `multi_head_attention_forward` if `version` is before 2.12."""
    if version < _DELETED_SINCE:
        yield "torch.nn.functional.multi_head_attention_forward", _without_deletions(_attend)


def _without_deletions(function: Any) -> FunctionType:
    """Return a copy of a function whose `del` statements for local variables do nothing."""
    code = bytearray(function.__code__.co_code)
    for instruction in dis.get_instructions(function):
        if instruction.opname == "DELETE_FAST":
            code[instruction.offset] = dis.opmap["NOP"]
    copy = FunctionType(
        function.__code__.replace(co_code=bytes(code)),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(vars(function))
    return copy
