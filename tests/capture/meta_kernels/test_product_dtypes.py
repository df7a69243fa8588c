"""Products of dtypes that CUDA refuses are refused, in torch's words."""

import re
from typing import Any

import pytest
import torch

from planner.capture.meta_kernels.run import MetaRunner
from planner.program import Phase
from tests.helpers.models import AMPERE

aten = torch.ops.aten


def run(func: Any, *args: Any) -> Any:
    """Run an operator on meta."""
    return MetaRunner(AMPERE).run(func, args, {}, Phase.FORWARD)


def of(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


CONVOLUTION = (None, [1], [0], [1], False, [0], 1)


@pytest.mark.parametrize(
    ("func", "args", "line"),
    [
        (
            aten.addmm.default,
            (of(3), of(4, 8, dtype=torch.bool), of(8, 3)),
            "mat1 and mat2 must have the same dtype, but got Bool and Float",
        ),
        (
            aten.mm.default,
            (of(4, 8, dtype=torch.float16), of(8, 3)),
            "mat1 and mat2 must have the same dtype, but got Half and Float",
        ),
        (
            aten.mm.default,
            (of(4, 8, dtype=torch.int64), of(8, 3, dtype=torch.int64)),
            "\"addmm_cuda\" not implemented for 'Long'",
        ),
        (
            aten.bmm.default,
            (of(1, 4, 8, dtype=torch.bool), of(1, 8, 3, dtype=torch.bool)),
            "\"bmm_cuda\" not implemented for 'Bool'",
        ),
        (
            aten.convolution.default,
            (of(1, 4, 8, dtype=torch.bool), of(2, 4, 3), *CONVOLUTION),
            "Input type (torch.cuda.BoolTensor) and weight type (torch.cuda.FloatTensor) should be the same",
        ),
    ],
)
def test_operands_that_cuda_refuses_are_refused(func: Any, args: tuple[Any, ...], line: str) -> None:
    """Kernels on meta take any dtypes; a plan of what cannot run would be none."""
    with pytest.raises(RuntimeError, match=re.escape(line)):
        run(func, *args)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_operands_that_cuda_takes_are_taken(dtype: torch.dtype) -> None:
    """All floating-point and complex dtypes have kernels."""
    one, other = of(4, 8, dtype=dtype), of(8, 3, dtype=dtype)
    assert run(aten.mm.default, one, other).dtype is dtype
    assert run(aten.addmm.default, of(3, dtype=dtype), one, other).dtype is dtype
    assert run(aten.bmm.default, one[None], other[None]).dtype is dtype
