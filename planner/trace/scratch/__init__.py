"""Memory that kernels take and give back, or keep, without a tensor holding it.

An operator is in one of three states: it has a rule here, it is declared free of scratch memory, or it is
unknown. Unknown operators are named in every answer.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Any

import torch

from planner.trace.scratch import attention, gemm
from planner.trace.scratch.free import FREE
from planner.trace.scratch.gemm import Workspaces

__all__ = ["CPU_OUTPUTS", "State", "Workspaces", "scratch_bytes", "state_of"]

Rule = Callable[
    [tuple[Any, ...], Any, tuple[int, int]], tuple[int, ...]
]  # arguments, result, capability -> bytes

RULES: dict[Any, Rule] = dict(attention.RULES)
CPU_OUTPUTS: dict[Any, tuple[int, ...]] = (
    attention.CPU_OUTPUTS
)  # positions of results that a CUDA kernel keeps on CPU


class State(StrEnum):
    RULE = "rule"
    FREE = "free"
    UNKNOWN = "unknown"


def state_of(func: Any) -> State:
    """Whether the scratch memory of this operator is known."""
    if func in RULES or func in gemm.OPS:
        return State.RULE
    schema = func._schema
    if not schema.name.startswith("aten::"):
        return State.FREE if schema.name.startswith("profiler::") else State.UNKNOWN
    if schema.name in FREE or torch.Tag.pointwise in func.tags:
        return State.FREE
    aliases = [value.alias_info for value in schema.returns]
    if aliases and all(alias is not None and not alias.is_write for alias in aliases):
        return State.FREE  # a view
    return State.UNKNOWN


def scratch_bytes(func: Any, args: tuple[Any, ...], out: Any, capability: tuple[int, int]) -> tuple[int, ...]:
    """Sizes of the blocks that the kernel takes one after the other and gives back before it returns."""
    rule = RULES.get(func)
    return () if rule is None else rule(args, out, capability)
