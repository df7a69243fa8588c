"""Products of groups: one kernel of all groups, or cuBLAS for each."""

import pytest
import torch
from torch import Tensor

from planner.jobs import Mode
from planner.program.events import Alloc, Category
from tests.capture.recorder.test_recorder import Apply
from tests.helpers.models import AMPERE, HOPPER, job_of, trace_of


@pytest.mark.parametrize(
    ("capability", "dtype", "workspaces"),
    [
        (AMPERE, torch.bfloat16, [8519680]),
        (HOPPER, torch.bfloat16, []),
        (HOPPER, torch.float32, [33554432]),
        ((10, 0), torch.bfloat16, []),
        ((12, 0), torch.bfloat16, [33554432]),
    ],
)
def test_cublas_multiplies_groups_that_no_kernel_does(
    capability: tuple[int, int], dtype: torch.dtype, workspaces: list[int]
) -> None:
    def multiply(x: Tensor) -> Tensor:
        bounds = torch.tensor([8, 32], dtype=torch.int32, device=x.device)
        factors = torch.ones(2, 64, 16, dtype=dtype, device=x.device)
        return torch._grouped_mm(x.to(dtype), factors, offs=bounds)

    trace = trace_of(lambda: Apply(multiply), job_of("64", mode=Mode.INFER), 32, capability)
    made = [event for event in trace.events if isinstance(event, Alloc)]
    assert [event.size_bytes for event in made if event.category is Category.WORKSPACE] == workspaces
