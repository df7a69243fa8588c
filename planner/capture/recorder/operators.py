"""Classify operators for the recorder.

The facts about an operator are the kind of its outputs, its workspace rule and the like.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from torch import Tensor

from planner.capture.arguments import leaves_of
from planner.capture.recorder.composed import COMPOSED
from planner.capture.recorder.pending_collectives import is_collective
from planner.capture.workspaces.ops import Rule
from planner.capture.workspaces.registry import cpu_outputs, is_unknown, rule_of
from planner.capture.workspaces.tensor.gemm import BLAS_OPS
from planner.program import TorchVersion


class OutputKind(Enum):
    """The kinds of an operator's outputs: new tensors, views, changed arguments or resized arguments."""

    NEW = auto()
    VIEWS = auto()  # of arguments
    ARGUMENTS = auto()  # arguments changed in place, or no outputs
    RESIZED = auto()  # an argument, possibly with another storage


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator with its kind of outputs, its workspace rule and other facts for the recorder."""

    func: Any
    name: str
    outputs: OutputKind
    rule: Rule | None  # its workspace rule, or None if it has no rule
    uses_blas: bool
    cpu_outputs: tuple[int, ...]  # positions of results that a CUDA kernel keeps on the CPU
    is_collective: bool = False  # whether it starts or awaits a functional collective
    parts: Callable[..., Any] | None = None  # runs it by other operators, as ATen does beneath autograd
    is_unknown: bool = False  # whether its CUDA kernel may need an unknown workspace

    def new_tensors(self, out: Any) -> list[Tensor]:
        """Return the tensors of an operator's result in order, without tensors that CUDA makes on the CPU."""
        if isinstance(out, Tensor):
            return [out]
        if not isinstance(out, tuple | list):
            return []
        on_gpu = [item for position, item in enumerate(out) if position not in self.cpu_outputs]
        return [leaf for leaf in leaves_of(on_gpu) if isinstance(leaf, Tensor)]


def inspect_operator(func: Any, version: TorchVersion) -> Operator:
    """Return an operator's kind of outputs, workspace rule and other facts, in a version of torch."""
    on_cpu = cpu_outputs(func, version)
    rule, uses_blas = rule_of(func), func in BLAS_OPS
    outputs, parts = _outputs_of(func), COMPOSED.get(func)
    unknown = parts is None and is_unknown(func)
    return Operator(func, str(func), outputs, rule, uses_blas, on_cpu, is_collective(func), parts, unknown)


def _outputs_of(func: Any) -> OutputKind:
    schema = func._schema
    if schema.name in ("aten::resize_", "aten::resize_as_", "aten::set_"):
        return OutputKind.RESIZED
    if schema.name in ("aten::_unsafe_view", "aten::_reshape_alias", "aten::lift_fresh"):
        return OutputKind.VIEWS
    if schema.name in ("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"):
        return OutputKind.ARGUMENTS
    aliases = [value.alias_info for value in schema.returns]
    if not all(alias is not None for alias in aliases):
        return OutputKind.NEW
    if any(argument.is_out for argument in schema.arguments):  # `out=`, which takes the size of the result
        return OutputKind.RESIZED
    is_view = aliases and not any(alias.is_write for alias in aliases)
    return OutputKind.VIEWS if is_view else OutputKind.ARGUMENTS
