"""Memory that kernels take and give back, or keep, without a tensor holding it.

An operator is in one of three states: it has a rule here, it is declared free of scratch memory, or it is
unknown. Unknown operators are named in every answer.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import torch

from planner.capture.workspaces.nn import (
    attention,  # fmt: skip
    convolution,
    detection as boxes,
    losses,
    norms,
    rnn,
    softmax,
)
from planner.capture.workspaces.no_workspace import FREE
from planner.capture.workspaces.steps import Held, Made, Release, ReleaseBeneath, Rule, Search, Step, Trial
from planner.capture.workspaces.tensor import (
    contiguous_copies as copying,
    fft as transforms,
    gemm,
    indexing,
    reductions,
    sorting,
)
from planner.capture.workspaces.tensor.gemm import Workspaces

__all__ = [
    "CPU_OUTPUTS", "RULES", "Held", "Made", "Release", "ReleaseBeneath", "Rule", "Search", "State", "Step",
    "Trial", "Workspaces", "rule_of", "state_of",
]  # fmt: skip

RULES: Mapping[Any, Rule] = {
    **copying.RULES,
    **attention.RULES,
    **boxes.RULES,
    **convolution.RULES,
    **gemm.RULES,
    **indexing.RULES,
    **losses.RULES,
    **norms.RULES,
    **reductions.RULES,
    **rnn.RULES,
    **softmax.RULES,
    **sorting.RULES,
    **transforms.RULES,
}
CPU_OUTPUTS: Mapping[Any, tuple[int, ...]] = (
    attention.CPU_OUTPUTS
)  # positions of results that a CUDA kernel keeps on CPU


def rule_of(func: Any) -> Rule | None:
    """The rule of this operator, if it has one."""
    return RULES.get(func) or boxes.BY_NAME.get(func._schema.name)


class State(StrEnum):
    RULE = "rule"
    FREE = "free"
    UNKNOWN = "unknown"


def state_of(func: Any) -> State:
    """Whether the scratch memory of this operator is known."""
    if func in convolution.UNKNOWN:
        return State.UNKNOWN
    if rule_of(func) is not None or func in gemm.OPS:
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
