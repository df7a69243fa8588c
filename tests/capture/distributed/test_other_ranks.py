"""Ranks that need what other ranks send, and run them first."""

from pathlib import Path

import pytest

from planner.capture.distributed.other_ranks import MessageNeededError, OtherRanks
from planner.capture.session import record
from planner.errors import UsageError
from planner.jobs import TensorSpec, resolve_job
from planner.program.events import Alloc, Category
from tests.helpers.models import AMPERE


def test_ranks_that_wait_for_each_other_are_refused() -> None:
    def run(rank: int) -> None:
        raise MessageNeededError(f"the shapes of {1 - rank}", 1 - rank)

    with pytest.raises(UsageError, match="rank [01] and others wait for each other"):
        OtherRanks().trace(0, run)


def test_a_rank_that_does_not_send_is_refused() -> None:
    def run(rank: int) -> None:
        if rank:
            raise MessageNeededError("the shapes", 0)

    with pytest.raises(UsageError, match="rank 0 does not send the shapes"):
        OtherRanks().trace(1, run)


def test_a_sender_may_need_a_third_rank() -> None:
    """Each rank sends the message of the rank above it, doubled, and the last sends 1."""
    ranks = OtherRanks()

    def run(rank: int) -> int:
        content = 1 if rank == 3 else 2 * ranks.receive(rank + 1, rank + 1)
        ranks.send(rank, content)
        return content

    assert ranks.trace(0, run) == 8


BROADCAST = """
import torch
from torch import distributed, nn

distributed.init_process_group("nccl")
rank = distributed.get_rank()
torch.cuda.set_device(rank)
WHERE
model = nn.Linear(settings[0]["width"], 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)


def train_step(batch):
    model(batch.cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LISTED = """
settings = [{"width": 64}] if rank == 1 else [None]
distributed.broadcast_object_list(settings, src=1)
"""
IN_A_GROUP = """
from torch.distributed import broadcast_object_list
group = distributed.new_group([1, 2])
settings = [{"width": 64}] if rank == 1 else [{"width": 32}]
if rank:
    broadcast_object_list(settings, group=group, group_src=0)
"""


@pytest.mark.parametrize(
    ("code", "rank", "width"), [(LISTED, 0, 64), (LISTED, 1, 64), (LISTED, 2, 64), (IN_A_GROUP, 2, 64)]
)
def test_a_rank_gets_the_objects_that_another_sends(tmp_path: Path, code: str, rank: int, width: int) -> None:
    """Settings that one rank reads and sends to all decide the model of each."""
    (tmp_path / "train.py").write_text(BROADCAST.replace("WHERE", code))
    options = {"inputs": [TensorSpec((width,))], "world_size": 3, "rank": rank}
    trace = record(resolve_job(f"{tmp_path / 'train.py'}:train_step", {}, **options), 4, AMPERE)
    held = [e.size_bytes for e in trace.events if isinstance(e, Alloc) and e.category is Category.PARAMETER]
    assert held == [4 * 8 * width, 4 * 8]
