"""Scratch memory of convolutions: what PyTorch itself takes, and what is known of cuDNN's.

What cuDNN takes depends on which of its engines its heuristics choose, which it does not tell without a
GPU. Published runs fix one term, `ImageWise`; all else is taken to be nothing, and convolutions stay among
the unknown operators of the answer. Depthwise convolutions that PyTorch runs with kernels of its own take
nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from planner.chip import Chip
from planner.trace.scratch.reductions import reduction
from planner.trace.scratch.steps import Rule, Step, Trial, tensor_bytes

aten = torch.ops.aten

MIB = 2**20


@dataclass(frozen=True, slots=True)
class ImageWise:
    """Weight gradients taken image by image and added up: a workspace of batch size times weights.

    Of pointwise convolutions in fp32 whose weights have so many bytes and whose output so few positions that
    a product over one image is cheap beside its result; where the workspace would be larger than a limit,
    cuDNN goes another way, and so does PyTorch where the memory for it is refused (Conv_v8.cpp).
    """

    least_weight_bytes: int
    most_positions: int
    limit_bytes: int

    def workspace_bytes(self, batch: int, weight_bytes: int, positions: int) -> int:
        """The workspace; 0 where the term does not apply.

        >>> ImageWise(2**20, 9, 2**29).workspace_bytes(323, 1280 * 320 * 4, 9) / 2**20
        504.6875
        >>> ImageWise(2**20, 9, 2**29).workspace_bytes(377, 1280 * 320 * 4, 9)
        0
        """
        if weight_bytes < self.least_weight_bytes or positions > self.most_positions:
            return 0
        size_bytes = batch * weight_bytes
        return size_bytes if size_bytes <= self.limit_bytes else 0


# By benchmarks/convolution_workspaces.py, which fits them to published peaks of an RTX 3060 and prints
# between which values each may lie; on an RTX 4060 the same layers take nothing. Of other GPUs nothing tells.
IMAGE_WISE: Mapping[tuple[int, int], ImageWise] = {(8, 6): ImageWise(MIB, 9, 512 * MIB)}


def _backward(args: tuple[Any, ...], out: Any, chip: Chip) -> tuple[Step, ...]:
    """The weight gradient's workspace, then the bias gradient, a sum of the output's gradient over all but
    the channels, which is taken after the others (ATen/native/Convolution.cpp, convolution_backward).
    """
    grad: Tensor = args[0]
    mask = args[10]
    steps = _weight_gradient(args, chip) if mask[1] else ()
    if mask[2] and grad.dim() >= 3:
        steps += reduction(grad, [0, *range(2, grad.dim())], 4, chip)
    return steps


def _weight_gradient(args: tuple[Any, ...], chip: Chip) -> tuple[Step, ...]:
    grad: Tensor = args[0]
    weight: Tensor = args[2]
    term = IMAGE_WISE.get(chip.capability)
    transposed, groups = args[7], args[9]
    pointwise = weight.dim() == 4 and tuple(weight.shape[2:]) == (1, 1) and groups == 1 and not transposed
    if term is None or not pointwise or weight.dtype is not torch.float32 or not grad.is_contiguous():
        return ()
    positions = grad.shape[2] * grad.shape[3]
    size_bytes = term.workspace_bytes(grad.shape[0], tensor_bytes(weight), positions)
    return (Trial(size_bytes),) if size_bytes else ()


RULES: Mapping[Any, Rule] = {aten.convolution_backward.default: _backward}
# As far as cuDNN runs them.
UNKNOWN = frozenset({aten.convolution.default, aten.convolution_backward.default})
