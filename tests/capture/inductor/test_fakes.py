"""The dispatcher answers for fake tensors as a build of torch with CUDA would."""

import pytest
import torch

from planner.capture.beneath_autograd import COMPOSITE_WITH_CUDA_KERNEL
from planner.capture.inductor.fakes import fakes_on_gpu


def _kernel(name: str, key: str) -> str:
    table = dict(line.split(": ", 1) for line in torch._C._dispatch_dump_table(f"aten::{name}").splitlines())
    return str(table[key])


@pytest.mark.parametrize("name", COMPOSITE_WITH_CUDA_KERNEL)
def test_autograd_keeps_operators_whole_that_have_a_kernel_for_cuda(name: str) -> None:
    """Their gradient is recorded as on CUDA, not their parts, and this holds for the fake tensors alone."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has_kernel(f"aten::{name}", "CompositeImplicitAutograd")
    with fakes_on_gpu():
        assert "[autograd kernel]" in _kernel(name, "AutogradCUDA")
        assert has_kernel(f"aten::{name}", "CUDA")
    if not torch.backends.cuda.is_built():
        assert "[math kernel]" in _kernel(name, "AutogradCUDA")
