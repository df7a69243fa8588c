"""Hold the refusals of plans by dtype against a GPU."""

import re
from typing import Any

import pytest
import torch

from tests.helpers.refused_operands import REFUSED

pytestmark = pytest.mark.gpu


def on_gpu(value: Any) -> Any:
    """Return zeros on the GPU for a tensor, and any other argument unchanged."""
    return torch.zeros_like(value, device="cuda") if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("name", REFUSED)
def test_gpus_refuse_the_operands_that_plans_refuse(name: str) -> None:
    """torch's words are the same."""
    func, args, line = REFUSED[name]
    with pytest.raises(RuntimeError, match=re.escape(line)):
        func(*map(on_gpu, args))
