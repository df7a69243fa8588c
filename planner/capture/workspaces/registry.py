"""Look up the workspace rule of an operator.

A workspace is memory that a CUDA kernel allocates besides results. An operator has a rule, is declared to
need no workspace, or is unknown. Every plan names unknown operators.
"""

from typing import Any

import torch

from planner.capture.operator_table import operator_table
from planner.capture.workspaces.nn import attention, convolution, detection, losses, norms, rnn
from planner.capture.workspaces.no_workspace import NO_WORKSPACE_OPS
from planner.capture.workspaces.ops import Rule
from planner.capture.workspaces.tensor import (
    complex_results,
    contiguous_copies,
    fake_quantization,
    fft,
    gemm,
    indexing,
    linalg,
    packed_copies,
    quantized,
    reductions,
    sorting,
)
from planner.program import TorchVersion

_MODULES = (
    contiguous_copies, attention, detection, convolution, gemm, indexing, losses, norms, reductions, rnn,
    sorting, fft, linalg, packed_copies, complex_results,
    fake_quantization,
)  # fmt: skip
RULES = operator_table({names: rule for module in _MODULES for names, rule in module.RULES.items()})
_RULES_BY_NAME = {
    **detection.RULES_BY_NAME,
    **packed_copies.RULES_BY_NAME,
    **quantized.RULES_BY_NAME,
}  # operators of compiled extensions
_CPU_OUTPUTS = operator_table(attention.CPU_OUTPUTS)


def rule_of(func: Any) -> Rule | None:
    """Return the workspace rule of an operator, or None if the operator has no rule.

    An overload that fills `out=` has the rule of the overload that makes its results.
    """
    return RULES.get(func) or _RULES_BY_NAME.get(func._schema.name) or _rule_without_out(func)


def _rule_without_out(func: Any) -> Rule | None:
    given = [argument for argument in func._schema.arguments if not argument.is_out]
    if len(given) == len(func._schema.arguments):
        return None
    names = [argument.name for argument in given]
    for other, rule in RULES.items():
        if other._schema.name == func._schema.name and names == [one.name for one in other._schema.arguments]:
            return lambda args, out, target: rule(args[: len(names)], out, target)
    return None


def cpu_outputs(func: Any, version: TorchVersion) -> tuple[int, ...]:
    """Return the indices of results that an operator's CUDA kernel makes on the CPU in torch `version`."""
    positions, on_gpu_since = _CPU_OUTPUTS.get(func, ((), None))
    return positions if on_gpu_since is None or version < on_gpu_since else ()


def is_unknown(func: Any) -> bool:
    """Return whether the planner does not know if an operator needs a workspace.

    Return False if the operator has a rule, is declared to need no workspace, or is a pointwise operator, a
    view or a cuBLAS product.
    """
    if rule_of(func) is not None or func in gemm.BLAS_OPS:
        return False
    schema = func._schema
    if not schema.name.startswith("aten::"):
        return schema.name not in NO_WORKSPACE_OPS and not schema.name.startswith("profiler::")
    aliases = [value.alias_info for value in schema.returns]
    is_view = aliases and all(alias is not None and not alias.is_write for alias in aliases)
    is_view = is_view or torch.Tag.inplace_view in func.tags
    return not (schema.name in NO_WORKSPACE_OPS or torch.Tag.pointwise in func.tags or is_view)
