"""Workspace rules of pointwise operators that return real numbers for complex ones."""

from collections.abc import Mapping

from torch import Tensor

from planner.capture.workspaces._rule import tensor_bytes
from planner.capture.workspaces.ops import Args, Ops, Rule
from planner.program import Target


def _real_part_of_result(args: Args, out: Tensor, target: Target) -> Ops:
    """Return the ops of `abs` and `angle`.

    A complex tensor has a complex result, whose real part is copied into the output. The output is allocated
    before the complex result (ATen/native/UnaryOps.cpp).
    """
    x = args[0]
    return () if not x.is_complex() or out.is_complex() else (tensor_bytes(x),)


RULES: Mapping[str, Rule] = {"abs abs.out angle angle.out": _real_part_of_result}
