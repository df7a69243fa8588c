"""Composite operators as the version of torch that runs has them."""

import pytest
import torch

from planner.capture.cuda.composites import kernels

TORCH_2_6, TORCH_2_9 = (2, 6), (2, 9)


@pytest.mark.parametrize(
    ("equation", "shapes", "strides"),
    [
        ("oi,...i->...o", [(7, 5), (3, 4, 5)], (4, 1, 12)),
        ("o i, b n i -> b n o", [(7, 5), (3, 4, 5)], (4, 1, 12)),
        ("...i,oi->...o", [(3, 4, 5), (7, 5)], (28, 7, 1)),
        ("kj,ji", [(3, 4), (4, 5)], (1, 5)),  # "ik": labels of the result in alphabetical order
        ("bij,bjk->bki", [(2, 3, 4), (2, 4, 5)], (15, 1, 5)),
        ("...kd,...qd->...qk", [(2, 3, 4, 5), (2, 3, 6, 5)], (72, 24, 1, 6)),
        ("oi,bni->bno", [(7, 5), (1, 4, 5)], (4, 1, 4)),
        ("ab...,bc->c...a", [(2, 3, 4, 5), (3, 6)], (1, 60, 12, 6)),
        ("i,j->ji", [(3,), (4,)], (3, 1)),  # no product: nothing is summed
        ("i,...i->...i", [(5,), (2, 3, 5)], (15, 5, 1)),
    ],
)
def test_einsum_before_torch_2_9_has_the_strides_of_its_product(
    equation: str, shapes: list[tuple[int, ...]], strides: tuple[int, ...]
) -> None:
    """The strides are those that torch 2.6.0 returns."""
    operands = [torch.empty(shape, device="meta") for shape in shapes]
    older = kernels(TORCH_2_6)["einsum"](equation, operands)
    newer = torch.einsum(equation, *operands)
    assert (older.shape, older.stride()) == (newer.shape, strides)


def test_einsum_of_torch_2_9_is_its_own() -> None:
    """It has been contiguous since then, as in the torch that plans."""
    assert "einsum" not in kernels(TORCH_2_9)
    product = torch.einsum("oi,bi->bo", torch.empty(7, 5), torch.empty(3, 5))
    assert product.is_contiguous()
