"""Models that refuse small batches: answers come from the smallest that trains, named where none fits.

Batch norm over single values, behind a global pool, trains from batch 2 on.
"""

from typing import Any

import pytest
from torch import Tensor, nn

import planner
from planner.errors import ModelError

IMAGES: dict[str, Any] = {"input": "3x256x256", "target": "scalar:int64", "cudnn": "stored"}
SMALLEST = "batch sizes are tried from 2 on: "
REASON = "Expected more than 1 value per channel when training, got input size torch.Size([1, 512, 1, 1])"


class Pooled(nn.Module):
    """Batch norm behind a global pool, as in ASPP and PSP heads.

    What the sum of copies took is cached until the peak, where a retry can release it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.fc = (
            nn.Conv2d(3, 512, 3, padding=1),
            nn.BatchNorm2d(512),
            nn.Linear(512, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        copies = x.repeat(1, 30, 1, 1).sum()
        pooled = self.body(x + copies).mean((2, 3), keepdim=True)
        return self.fc(self.norm(pooled).flatten(1))  # type: ignore[no-any-return]


def test_a_batch_with_retries_is_an_answer_where_a_smaller_one_cannot_train() -> None:
    """Batch 2 fits at the cost of retries, batch 1 does not train: the answer is 2."""
    cap = int(planner.estimate(Pooled, 2, gpu_mib=24_000, **IMAGES).to_dict()["peak_reserved_mib"]) - 2
    shown = planner.max_batch(Pooled, allocator_cap_mib=cap, confidence=0.5, **IMAGES).to_dict()
    assert (shown["max_batch"], shown["comfortable_batch"], shown["at_max"]["fits"]) == (2, 0, "with_retries")
    (note,) = (line for line in shown["at_max"]["assumptions"] if line.startswith(SMALLEST))
    assert note.endswith(REASON)


def test_where_nothing_fits_the_smallest_batch_that_trains_is_named() -> None:
    """A cap of 10 MiB: not even batch 2 fits, and batch 1 is no probe."""
    result = planner.max_batch(Pooled, allocator_cap_mib=10, **IMAGES)
    shown = result.to_dict()
    assert (shown["max_batch"], shown["first_failure"]["batch"]) == (0, 2)
    assert all(batch > 1 for batch, _ in shown["probes"])
    assert "not even 2 fits, the smallest that trains" in str(result)
    assert SMALLEST in " ".join(str(result).split())


def test_all_gpus_answer_from_the_smallest_batch_that_trains() -> None:
    """The figures of a GPU that is too small are of batch 2; pictures leave out batch 1."""
    cap: dict[str, Any] = {"filter": ["T4"], "allocator_cap_mib": 10}
    (row,) = planner.gpus(Pooled, **cap, **IMAGES).table.fits[:1]
    assert (row.max_batch, row.batch) == (0, 2)


def test_the_largest_size_is_searched_from_the_smallest_that_trains() -> None:
    """Two poolings leave nothing of less than four pixels."""

    def net() -> nn.Module:
        pools = (nn.MaxPool2d(8), nn.MaxPool2d(8))
        return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), *pools, nn.AdaptiveAvgPool2d(1), nn.Flatten())

    sized: dict[str, Any] = {"input": "3x8..512x8..512", "pad_to": 8, "loss": "sum", "cudnn": "stored"}
    result = planner.max_size(net, 4, gpu="T4", **sized)
    assert (result.max_size, result.plan.sizes[0]) == ((512,), (64,))
    none = planner.max_size(net, 4, allocator_cap_mib=2, **sized)
    assert none.max_size is None
    assert "not even 64 fits, the smallest that trains" in str(none)


def test_a_model_that_trains_at_no_size_is_refused() -> None:
    """Its own error is the answer."""

    def net() -> nn.Module:
        return nn.Linear(7, 7)

    with pytest.raises(ModelError, match="must have same reduction dim"):
        planner.max_size(net, 4, input="8..64", pad_to=8, loss="sum", gpu="T4")
    with pytest.raises(ModelError, match="must have same reduction dim"):
        planner.max_batch(net, input="8", loss="sum", gpu="T4")
