"""Real results of complex tensors."""

from typing import Any

import pytest
import torch

from tests.helpers.workspaces import aten, meta, steps


@pytest.mark.parametrize("func", [aten.abs.default, aten.angle.default])
def test_a_magnitude_or_an_angle_begins_as_a_complex_result(func: Any) -> None:
    """Beside the real output, and freed once its real part is copied; a real tensor needs none."""
    assert steps(func, meta(8, 5, dtype=torch.complex64)) == (8 * 5 * 8,)
    assert steps(func, meta(8, 5, dtype=torch.complex128)[:, :2]) == (8 * 2 * 16,)
    assert steps(func, meta(8, 5)) == ()


def test_a_given_output_takes_the_same_complex_result() -> None:
    """Only a complex output is written directly."""
    x = meta(8, 5, dtype=torch.complex64)
    assert steps(aten.abs.out, x, out=meta(8, 5)) == (8 * 5 * 8,)
    assert steps(aten.angle.out, x, out=meta(8, 5, dtype=torch.complex64)) == ()
