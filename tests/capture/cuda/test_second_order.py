"""Nodes of second-order graphs are numbered as the engine's thread of a GPU numbers them."""

import pytest
import torch
from torch import Tensor

from planner.capture.cuda.operators.semantics import cuda_semantics
from tests.helpers.models import AMPERE


def chain(x: Tensor, length: int) -> Tensor:
    """Apply as many sines."""
    for _ in range(length):
        x = x.sin()
    return x


def number_of(tensor: Tensor) -> int:
    """Return the number of the node that made a tensor."""
    assert tensor.grad_fn is not None
    return tensor.grad_fn._sequence_nr()


def test_second_order_nodes_run_after_those_of_the_forward_pass() -> None:
    """The nodes that a backward pass makes have lower numbers than those of a long forward pass before it."""
    with cuda_semantics(AMPERE):
        x = torch.ones(4, device="meta", requires_grad=True)
        long = chain(x, 50)
        (gradient,) = torch.autograd.grad(x.sin().sum(), x, create_graph=True)
        assert number_of(gradient) < number_of(long)


def test_second_order_nodes_are_numbered_in_their_order() -> None:
    """Those of a later backward pass have higher numbers than those of an earlier one."""
    with cuda_semantics(AMPERE):
        x = torch.ones(4, device="meta", requires_grad=True)
        (first,) = torch.autograd.grad(x.sin().sum(), x, create_graph=True)
        chain(x, 50)
        (second,) = torch.autograd.grad(x.sin().sum(), x, create_graph=True)
        assert number_of(first) < number_of(second)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_of_leaves_have_such_nodes_too() -> None:
    """`backward(create_graph=True)` numbers the nodes behind the gradients that it leaves on the leaves."""
    with cuda_semantics(AMPERE):
        x = torch.ones(4, device="meta", requires_grad=True)
        long = chain(x, 50)
        x.sin().sum().backward(create_graph=True)
        assert x.grad is not None
        assert number_of(x.grad) < number_of(long)
