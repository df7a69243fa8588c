"""Plans over the ranks of a job: the answer of the one that takes most."""

from pathlib import Path

import pytest

import planner

SCRIPT = """
import torch
from torch import distributed, nn

distributed.init_process_group("nccl")
width = 64 * (1 + 3 * (distributed.get_rank() == 1))


class Trainer:
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 64)).cuda()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, batch):
        self.model(batch.cuda()).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
"""


@pytest.mark.slow
def test_the_rank_that_takes_most_answers(tmp_path: Path) -> None:
    """Of three ranks the second is the widest, as the file's import decides: it answers in both commands."""
    file = tmp_path / "script.py"
    file.write_text(SCRIPT, encoding="utf-8")
    job = {"input": "64", "world_size": 3}
    every = planner.estimate(f"{file}:Trainer", 4096, **job).to_dict()
    alone = planner.estimate(f"{file}:Trainer", 4096, rank=1, **job).to_dict()
    assert every["job"]["rank"] == 1
    assert [row["ranks"] for row in every["ranks"]] == [[0, 2], [1]]
    assert (
        every["peak_allocated_mib"] == every["ranks"][1]["peak_allocated_mib"] == alone["peak_allocated_mib"]
    )
    assert alone["ranks"] == []
    largest = planner.max_batch(f"{file}:Trainer", allocator_cap_mib=600, **job)
    of_widest = planner.max_batch(f"{file}:Trainer", allocator_cap_mib=600, rank=1, **job)
    assert largest.max_batch == of_widest.max_batch
