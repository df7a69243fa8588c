"""DistributedDataParallel in users' files, beside the planner's own buckets."""

from pathlib import Path

import pytest
import torch
from torch import nn

from planner.capture.session import record
from planner.jobs import Job, Mode, Optimizer, TensorSpec, ZeroGrad, resolve_job
from planner.program.events import Alloc, Category, Free, Trace
from tests.helpers.models import AMPERE, job_of

SCRIPT = """
import os
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

distributed.init_process_group("nccl")
local_rank = int(os.environ["LOCAL_RANK"])


class WithUnused(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body, self.unused = body, nn.Linear(8, 8)

    def forward(self, x):
        return self.body(x)


class Trainer:
    def __init__(self, read=False, unused=False, **options):
        layers = [nn.Linear(1024, 1024, bias=False) for _ in range(9)]
        model = nn.Sequential(nn.BatchNorm1d(1024), *layers)
        model = WithUnused(model) if unused else model
        self.model = DistributedDataParallel(model.cuda(), device_ids=[local_rank], **options)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.read = read

    def step(self, x):
        self.optimizer.zero_grad()
        loss = self.model(x.cuda()).sum()
        loss.backward()
        self.optimizer.step()
        if self.read:
            print(loss.item())
"""
MIB = 2**20


def planned(folder: Path, torch: str = "", **arguments: object) -> Trace:
    """The trace of a rank of two, under a version of torch."""
    file = folder / "script.py"
    file.write_text(SCRIPT, encoding="utf-8")
    given = {"inputs": [TensorSpec((1024,))], "world_size": 2, "model_args": list(arguments.items())}
    given["torch"] = torch
    return record(resolve_job(f"{file}:Trainer", {}, **given), 8, AMPERE)


def buckets(trace: Trace) -> list[float]:
    """MiB of the flat blocks above 1 MiB that are no layer's 4, in order."""
    made = [one for one in trace.events if isinstance(one, Alloc) and one.category is not Category.WORKSPACE]
    sizes = [one.size_bytes / MIB for one in made]
    return [round(size, 2) for size in sizes if size >= 1 and size != 4]


def meta_layers(_: Job) -> nn.Module:
    """The script's model on meta."""
    with torch.device("meta"):
        return nn.Sequential(nn.BatchNorm1d(1024), *(nn.Linear(1024, 1024, bias=False) for _ in range(9)))


def test_a_file_has_the_buckets_of_the_option(tmp_path: Path) -> None:
    """torch's reducer in a file allocates what --ddp does: a broadcast, one bucket, then three, 4 MiB of them
    the first.
    """
    job = job_of(
        "1024", mode=Mode.TRAIN, steps=3, ddp=True, optimizer=Optimizer.SGD, zero_grad=ZeroGrad.BEFORE_FORWARD
    )
    assert (
        buckets(planned(tmp_path)) == buckets(record(job, 8, AMPERE, meta_layers)) == [36.02, 36.01, 28, 4.01]
    )


@pytest.mark.parametrize(("version", "is_held"), [("2.6", False), ("2.7", False), ("2.8", True), ("", True)])
def test_the_first_bucket_is_held_since_2_8(tmp_path: Path, version: str, is_held: bool) -> None:
    """Before, it is freed before the buckets of the second step are allocated."""
    events = planned(tmp_path, version).events
    sizes = [event.size_bytes // MIB if isinstance(event, Alloc) else 0 for event in events]
    first = events[sizes.index(36, sizes.index(36) + 1)]
    assert isinstance(first, Alloc)
    freed = [isinstance(event, Free) and event.block == first.block for event in events].index(True)
    assert (freed > sizes.index(28)) == is_held


def test_a_smaller_cap_makes_more_buckets(tmp_path: Path) -> None:
    """With `bucket_cap_mb` of 10 each bucket is full with three layers."""
    assert buckets(planned(tmp_path, bucket_cap_mb=10))[2:] == [12, 12, 12]


def test_unused_parameters_keep_the_first_buckets_from_holding_all(tmp_path: Path) -> None:
    """With `find_unused_parameters` the first step already has buckets of the usual size."""
    of_first_step = buckets(planned(tmp_path, find_unused_parameters=True, unused=True))[1:]
    assert max(of_first_step) < 36


@pytest.mark.parametrize("options", [{"static_graph": True}, {"gradient_as_bucket_view": True}])
def test_options_run_in_torchs_own_reducer(tmp_path: Path, options: dict[str, bool]) -> None:
    """A static graph and gradients that are views of buckets are planned; views save the gradients."""
    assert 36.01 in buckets(planned(tmp_path, **options))


def test_a_step_that_reads_its_loss_is_planned(tmp_path: Path) -> None:
    """The buckets are the same where values of tensors are followed."""
    assert buckets(planned(tmp_path, read=True)) == buckets(planned(tmp_path))
