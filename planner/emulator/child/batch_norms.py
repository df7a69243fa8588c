"""Let batch norm average over all batches, by a count that it reads from the GPU.

Without a momentum, as in `torch.optim.swa_utils.update_bn`, it divides by the number of batches, which a
kernel that computes nothing leaves at zero.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

MODULE = "torch.nn.modules.batchnorm"


def attach(norms: Any) -> None:
    """Patch batch norm so that it takes a momentum of 1 if it has none, which takes the same memory."""
    plain = norms._BatchNorm.forward

    @wraps(plain)
    def forward(self: Any, *args: Any) -> Any:
        if self.momentum is not None:
            return plain(self, *args)
        self.momentum = 1.0
        try:
            return plain(self, *args)
        finally:
            self.momentum = None

    norms._BatchNorm.forward = forward
