"""Operands of dtypes that CUDA refuses are refused, in torch's words."""

import re
from typing import Any

import pytest
import torch

from planner.capture.meta_kernels.run import MetaRunner
from planner.program import Phase
from tests.helpers.models import AMPERE
from tests.helpers.refused_operands import LABELS, MASK, REFUSED, SQUARE, of

aten = torch.ops.aten


def run(func: Any, *args: Any) -> Any:
    """Run an operator on meta."""
    return MetaRunner(AMPERE).run(func, args, {}, Phase.FORWARD)


@pytest.mark.parametrize("name", REFUSED)
def test_operands_that_cuda_refuses_are_refused(name: str) -> None:
    """Kernels on meta take any dtypes; a plan of what cannot run would be none."""
    func, args, line = REFUSED[name]
    with pytest.raises(RuntimeError, match=re.escape(line)):
        run(func, *args)


def test_factors_of_different_dtypes_are_named() -> None:
    """In the words of a linear layer; for a bare product torch names the types of C++."""
    with pytest.raises(RuntimeError, match=r"mat1 and mat2 must have the same dtype, but got Half and Float"):
        run(aten.mm.default, SQUARE.half(), SQUARE)


@pytest.mark.parametrize("name", ["index_put", "index_put_", "_index_put_impl_"])
def test_values_of_another_dtype_are_not_assigned(name: str) -> None:
    """Masked tokens of an autocast region, in bfloat16, take no parameter in float32 as it is."""
    given, places = of(4, 8, dtype=torch.bfloat16), [torch.zeros(2, dtype=torch.int64, device="meta")]
    func = getattr(aten, name).default
    with pytest.raises(RuntimeError, match="got BFloat16 for the destination and Float for the source"):
        run(func, given, places, of(8, dtype=torch.float32))
    assert run(func, given, places, of(8, dtype=torch.bfloat16)).shape == (4, 8)
    assert run(func, given, places, of(dtype=torch.float32)).shape == (4, 8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_operands_that_cuda_takes_are_taken(dtype: torch.dtype) -> None:
    """All floating-point and complex dtypes have kernels for products."""
    one, other = of(4, 8, dtype=dtype), of(8, 3, dtype=dtype)
    assert run(aten.mm.default, one, other).dtype is dtype
    assert run(aten.addmm.default, of(3, dtype=dtype), one, other).dtype is dtype
    assert run(aten.bmm.default, one[None], other[None]).dtype is dtype


def test_operands_promote_before_they_are_refused() -> None:
    """A loss between predictions and integers, or a mean of pixels in float, has kernels."""
    assert run(aten.mse_loss.default, SQUARE, LABELS).dtype is torch.float32
    assert run(aten.mul.Tensor, MASK, SQUARE).dtype is torch.float32
