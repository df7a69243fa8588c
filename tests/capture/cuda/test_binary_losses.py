"""The gradient of binary cross entropy as CUDA makes it: in the storage of the sigmoid."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from planner.jobs import Loss, Mode, TensorSpec
from tests.helpers.models import born, job_of, trace_of


class Scores(nn.Module):
    """One parameter over images of 8 x 8 in channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_the_gradient_is_made_in_place() -> None:
    """The backward pass takes one tensor, the sigmoid, and makes neither difference nor product beside it."""
    job = job_of("1x8x8", target=TensorSpec((1, 8, 8)), mode=Mode.TRAIN, loss=Loss.BCE_WITH_LOGITS)
    trace = trace_of(Scores, job, 2)
    assert (born(trace, "sigmoid"), born(trace, "sub")) == ([2 * 8 * 8 * 4], [])


def test_the_gradient_is_that_of_torch() -> None:
    """The gradient is torch's with weights of elements and of classes, for each reduction."""
    from planner.capture.cuda.operators.composites import BinaryCrossEntropyWithLogits

    torch.manual_seed(0)
    x, target, weight, classes = torch.randn(4, 3), torch.rand(4, 3), torch.rand(4, 3), torch.rand(3)
    for chosen in ((None, None), (weight, None), (None, classes), (weight, classes)):
        for number, reduction in ((1, "mean"), (2, "sum")):
            ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
            BinaryCrossEntropyWithLogits.apply(ours, target, *chosen, number).backward()
            options = {"weight": chosen[0], "pos_weight": chosen[1], "reduction": reduction}
            F.binary_cross_entropy_with_logits(theirs, target, **options).backward()  # type: ignore[arg-type]
            torch.testing.assert_close(ours.grad, theirs.grad)
