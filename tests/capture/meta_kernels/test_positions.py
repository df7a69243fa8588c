"""Positions that a table does not have are refused, as a GPU's kernel refuses them."""

import pytest
import torch
from torch import Tensor, nn

import planner
from planner.errors import ModelError

ROWS = 16


class Positions(nn.Module):
    """Tokens and positions, which are made in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.tokens, self.places = way, nn.Embedding(100, 8), nn.Embedding(ROWS, 8)

    def forward(self, ids: Tensor) -> Tensor:
        batch, length = ids.shape
        places = {
            "a range": lambda: torch.arange(length, device=ids.device),
            "expanded": lambda: torch.arange(0, length, device=ids.device).unsqueeze(0).expand(batch, length),
            "of a longer range": lambda: torch.arange(9 * length, device=ids.device)[:length],
            "backwards": lambda: torch.arange(length, device=ids.device).flip(0),
            "in twos": lambda: torch.arange(0, 2 * length, 2, device=ids.device) // 2,
        }[self.way]()
        return self.tokens(ids) + self.places(places)


def plan(way: str, length: int) -> planner.EstimateResult:
    """Plan a forward and a backward pass of two samples of so many tokens."""
    return planner.estimate(lambda: Positions(way), 2, input=f"{length}:int64", loss="sum", gpu="T4")


@pytest.mark.parametrize("way", ["a range", "expanded", "of a longer range"])
def test_positions_beyond_a_table_are_refused(way: str) -> None:
    """The last row is looked up; one position more, and the error names the table, its line and its size."""
    assert plan(way, ROWS).fits
    problem = r"module 'places' fails at batch 2 .* position 16 is looked up in a table of 16 rows.*--input"
    with pytest.raises(ModelError, match=problem):
        plan(way, ROWS + 1)


@pytest.mark.parametrize("way", ["backwards", "in twos"])
def test_positions_that_are_computed_are_taken_as_they_come(way: str) -> None:
    """They are not known, as token ids are not."""
    assert plan(way, ROWS + 1).fits


def test_what_is_remembered_ends_with_its_tensor() -> None:
    """A later tensor in the same place is no range."""
    from planner.capture.meta_kernels import positions

    before = set(positions._RANGES)
    assert plan("a range", ROWS).fits
    assert set(positions._RANGES) <= before
