"""Products of FP8: which GPUs run them, and by cuBLAS or CUTLASS."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from planner.errors import ModelError
from planner.jobs import Mode
from planner.program.events import Alloc, Category
from tests.capture.recorder.test_recorder import Apply
from tests.helpers.models import AMPERE, HOPPER, job_of, trace_of

Product = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ADA = (8, 9)


def by_scale(a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor) -> Tensor:
    return torch._scaled_mm(a, b, of_a, of_b, out_dtype=torch.bfloat16)


def by_recipe(a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor) -> Tensor:
    kind = ScalingType.TensorWise if of_a.numel() == 1 else ScalingType.RowWise
    return scaled_mm(a, b, of_a, kind, of_b, kind, output_dtype=torch.bfloat16)


def workspaces(product: Product, capability: tuple[int, int], *, is_by_row: bool = False) -> list[int]:
    """Bytes of the workspaces of a product whose matrices have one scale each, or one for each row."""

    def multiply(x: Tensor) -> Tensor:
        narrow = x.to(torch.float8_e4m3fn)
        scale = torch.ones((32, 1) if is_by_row else (), device=x.device)
        return product(narrow, narrow.t(), scale, scale.t())

    trace = trace_of(lambda: Apply(multiply), job_of("64", mode=Mode.INFER), 32, capability)
    made = [event for event in trace.events if isinstance(event, Alloc)]
    return [event.size_bytes for event in made if event.category is Category.WORKSPACE]


@pytest.mark.parametrize("product", [by_scale, by_recipe])
def test_cublas_multiplies_matrices_with_a_scale_each(product: Product) -> None:
    assert workspaces(product, ADA) == [8519680]


@pytest.mark.parametrize("product", [by_scale, by_recipe])
def test_gpus_without_products_of_fp8_are_refused(product: Product) -> None:
    with pytest.raises(ModelError, match=r"products of FP8 need compute capability 8\.9"):
        workspaces(product, AMPERE)


@pytest.mark.parametrize("product", [by_scale, by_recipe])
def test_cublas_multiplies_by_a_scale_for_each_row_on_hopper_alone(product: Product) -> None:
    """CUTLASS multiplies on other GPUs."""
    assert workspaces(product, HOPPER, is_by_row=True) == [33554432]
    assert workspaces(product, ADA, is_by_row=True) == []
    assert workspaces(product, (10, 0), is_by_row=True) == []
