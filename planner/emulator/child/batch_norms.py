"""Prevent a division by zero in batch norm without a momentum.

`torch.optim.swa_utils.update_bn` sets no momentum. Batch norm then divides by the number of batches, which a
kernel that computes nothing leaves at zero.
"""

from __future__ import annotations

from typing import Any

MODULE = "torch.nn.modules.batchnorm"


def attach(norms: Any) -> None:
    """Replace `float` in the module of batch norm, so that a count of 0 reads as 1."""
    norms.float = lambda count: float(count) or 1.0
