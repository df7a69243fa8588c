"""Tensors that torch 1.10 saved and today's torch does not, for runs published with it.

Softmax saved its input beside its result for the backward pass, which needs the result alone
(pytorch/pytorch#49600 of 2020; #65242, of the weeks before 1.11, ended it). In unfused attention that
is one more matrix of scores in each layer. Read there; nothing is fitted.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional


class _SaveInput(torch.autograd.Function):
    """The identity, which saves its input for the backward pass."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        ctx.save_for_backward(values)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


@contextmanager
def as_torch_1_10() -> Iterator[None]:
    """Make softmax save its input while open; under autocast that is its copy in float32."""
    softmax = functional.softmax

    def softmax_saving_input(values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if torch.is_autocast_enabled("cuda") or kwargs.get("dtype") is torch.float32:
            values = values.float()
        return softmax(_SaveInput.apply(values), *args, **kwargs)

    with mock.patch.object(functional, "softmax", softmax_saving_input):
        yield
