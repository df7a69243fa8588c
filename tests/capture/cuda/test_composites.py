"""Composite operators as the version of torch that runs has them."""

import pytest
import torch
from torch import nn

from planner.capture.cuda.operators.composites import kernels
from planner.jobs import Mode
from tests.helpers.models import job_of, story, trace_of

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


@pytest.mark.parametrize(("dim", "keepdim"), [(None, False), (0, False), (1, True), (-1, False)])
def test_products_have_torchs_values_and_gradients(dim: int | None, keepdim: bool) -> None:
    """The gradient of a product without zeros is the product over each element."""
    planned = kernels(TORCH_2_9)["prod" if dim is None else "prod.dim_int"]
    x = torch.rand(3, 4, 5, dtype=torch.float64) + 0.5
    ours, torchs = x.clone().requires_grad_(), x.clone().requires_grad_()
    out = planned(ours) if dim is None else planned(ours, dim, keepdim)
    expected = torchs.prod() if dim is None else torchs.prod(dim, keepdim)
    assert torch.equal(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    assert torch.allclose(ours.grad, torchs.grad)


@pytest.mark.parametrize("shape", [(3, 4, 5), (3, 1, 5), (1,), ()])
def test_running_products_have_torchs_gradients(shape: tuple[int, ...]) -> None:
    """The gradient of a running product without zeros is a running sum from the end over each element."""
    x = (torch.rand(shape, dtype=torch.float64) + 0.5).requires_grad_()
    dim = min(1, len(shape) - 1) if shape else 0
    out, grad = x.cumprod(dim), torch.rand(shape, dtype=torch.float64)
    ours = kernels(TORCH_2_9)["cumprod_backward"](grad, x.detach(), dim, out.detach())
    assert torch.allclose(ours, *torch.autograd.grad(out, x, grad))


class Product(nn.Module):
    """A product over the first dimension of weighted samples."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).prod(1)


def test_the_gradient_of_a_product_in_full() -> None:
    """The backward pass makes a mask and counts of the zeros, then the quotient and the gradient."""
    lines = story(trace_of(Product, job_of("4x8", mode=Mode.TRAIN, steps=1), 2))
    start = lines.index("backward 1")
    assert lines[start + 2 : start + 13] == [
        "+64 temporaries",  # which of the 64 elements are zero
        "+128 temporaries",  # how many in each product
        "+512 workspaces",  # of the sum over all
        "-512",
        "+8 temporaries",
        "-8",
        "+256 temporaries",  # each product over each of its elements
        "+256 temporaries",  # times its gradient
        "-256",
        "-128",
        "-64",
    ]


class RunningProduct(nn.Module):
    """Running products of weighted samples."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).cumprod(1)


def test_the_gradient_of_a_running_product_in_full() -> None:
    """The backward pass makes weighted gradients and a mask of zeros, then sums them from the end."""
    lines = story(trace_of(RunningProduct, job_of("4x8", mode=Mode.TRAIN, steps=1), 2))
    start = lines.index("backward 1")
    assert [line.split()[0] for line in lines[start + 2 : start + 15]] == [
        "+256", "+64", "+1", "-1",  # weighted gradients, which elements are zero, and whether any is
        "+256", "+256", "+256", "-256", "-256",  # flipped, summed, flipped back
        "+256", "-256", "-64", "-256",  # over each element
    ]  # fmt: skip
