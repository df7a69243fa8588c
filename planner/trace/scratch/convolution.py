"""Scratch memory of convolutions, as far as PyTorch itself takes it.

What cuDNN takes beside it depends on which of its engines its heuristics choose, and is not known here:
convolutions stay among the unknown operators of the answer. The exception are depthwise convolutions that
PyTorch runs with kernels of its own, which take nothing.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from planner.chip import Chip
from planner.trace.scratch.reductions import reduction
from planner.trace.scratch.steps import Rule, Step

aten = torch.ops.aten


def _backward(args: tuple[Any, ...], out: Any, chip: Chip) -> tuple[Step, ...]:
    """The bias gradient is a sum of the output's gradient over all but the channels, taken after the others
    (ATen/native/Convolution.cpp, convolution_backward).
    """
    grad: Tensor = args[0]
    mask = args[10]
    if not mask[2] or grad.dim() < 3:
        return ()
    return reduction(grad, [0, *range(2, grad.dim())], 4, chip)


RULES: Mapping[Any, Rule] = {aten.convolution_backward.default: _backward}
# As far as cuDNN runs them.
UNKNOWN = frozenset({aten.convolution.default, aten.convolution_backward.default})
