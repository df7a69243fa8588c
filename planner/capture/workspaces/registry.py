"""Workspaces of CUDA kernels: memory that they allocate and free, or keep, without a tensor that holds it.

An operator has a rule, is declared to need no workspace, or is unknown. Every answer names unknown operators.
"""

from enum import StrEnum
from typing import Any

import torch

from planner.capture.operator_table import operator_table
from planner.capture.workspaces.nn import attention, convolution, detection, losses, norms, rnn, softmax
from planner.capture.workspaces.no_workspace import NO_WORKSPACE_OPS
from planner.capture.workspaces.ops import Rule
from planner.capture.workspaces.tensor import contiguous_copies, fft, gemm, indexing, reductions, sorting

_MODULES = (
    contiguous_copies, attention, detection, convolution, gemm, indexing, losses, norms, reductions, rnn,
    softmax, sorting, fft,
)  # fmt: skip
RULES = operator_table({names: rule for module in _MODULES for names, rule in module.RULES.items()})
# Positions of results that a CUDA kernel keeps on the CPU.
CPU_OUTPUTS = operator_table(attention.CPU_OUTPUTS)


class Coverage(StrEnum):
    """The state of knowledge of an operator's workspace."""

    RULE = "rule"
    NO_WORKSPACE = "no workspace"
    UNKNOWN = "unknown"


def rule_of(func: Any) -> Rule | None:
    """Return the rule of this operator, if it has one."""
    return RULES.get(func) or detection.RULES_BY_NAME.get(func._schema.name)


def coverage_of(func: Any) -> Coverage:
    """Return what is known of this operator's workspace."""
    if func in convolution.CUDNN_OPS:
        return Coverage.UNKNOWN
    if rule_of(func) is not None or func in gemm.BLAS_OPS:
        return Coverage.RULE
    schema = func._schema
    if not schema.name.startswith("aten::"):
        return Coverage.NO_WORKSPACE if schema.name.startswith("profiler::") else Coverage.UNKNOWN
    aliases = [value.alias_info for value in schema.returns]
    is_view = aliases and all(alias is not None and not alias.is_write for alias in aliases)
    if schema.name in NO_WORKSPACE_OPS or torch.Tag.pointwise in func.tags or is_view:
        return Coverage.NO_WORKSPACE
    return Coverage.UNKNOWN
