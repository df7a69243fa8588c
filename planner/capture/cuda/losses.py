"""`ctc_loss` as on CUDA: the lengths are numbers.

ATen/native/LossCTC.cpp reads lengths that are tensors and goes on with lists; on meta it keeps tensors, and
divides by lengths on the CPU, which fails.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int = 0,
    reduction: int = 1, zero_infinity: bool = False,
) -> Any:  # fmt: skip
    """Lengths that only a GPU would know are taken to be as long as their tensors are padded to."""
    samples, steps = log_probs.shape[1], log_probs.shape[0]
    given = input_lengths.tolist() if not input_lengths.is_meta else [steps] * samples
    wanted = target_lengths.tolist() if not target_lengths.is_meta else [targets.shape[-1]] * samples
    return aten.ctc_loss.IntList(log_probs, targets, given, wanted, blank, reduction, zero_infinity)


def kernels(capability: tuple[int, int]) -> dict[str, Callable[..., Any]]:
    """Operator name -> kernel."""
    return {"ctc_loss.Tensor": _ctc_loss}
