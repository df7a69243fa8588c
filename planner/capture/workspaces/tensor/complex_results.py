"""Workspace rules of pointwise operators that return real numbers for complex ones."""

from collections.abc import Mapping

from torch import Tensor

from planner.capture.workspaces._rule import tensor_bytes
from planner.capture.workspaces.ops import Args, Ops, Rule
from planner.program import Target


def _real_part_of_result(args: Args, out: Tensor, target: Target) -> Ops:
    """Return the ops of `abs` or `angle`: a block for the complex result of a complex input, else ().

    The real part of the complex result is copied into the output, which is allocated before
    (ATen/native/UnaryOps.cpp).
    """
    x = args[0]
    return () if not x.is_complex() or out.is_complex() else (tensor_bytes(x),)


RULES: Mapping[str, Rule] = {"abs abs.out angle angle.out": _real_part_of_result}
