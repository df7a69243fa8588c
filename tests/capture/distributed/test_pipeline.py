"""Stages of a pipeline, planned rank by rank."""

from pathlib import Path
from threading import Event, Thread

import pytest
from torch import distributed

from planner.allocator import UNLIMITED, replay_trace
from planner.capture.session import record
from planner.jobs import TensorSpec, resolve_job
from planner.program.events import Alloc, Category, Trace, validate
from tests.helpers.models import AMPERE

SCRIPT = """
import torch
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "looped": ScheduleInterleaved1F1B}
SCHEDULES["zbv"] = ScheduleZBVZeroBubble


class Trainer:
    def __init__(self, schedule, given=False):
        distributed.init_process_group("nccl")
        rank, ranks = distributed.get_rank(), distributed.get_world_size()
        indices = {"looped": [rank, rank + ranks], "zbv": [rank, 2 * ranks - 1 - rank]}.get(schedule, [rank])
        count = ranks * len(indices)
        # each stage is wider than the one before, so that none can take its input for its output
        parts = (nn.Linear(1024 * (1 + i), 1024 * (2 + i), bias=False) for i in indices)
        self.parts = nn.ModuleList(parts).cuda()
        stages = [
            PipelineStage(part, i, count, torch.device("cuda"), **self.shapes(i, given))
            for part, i in zip(self.parts, indices)
        ]
        self.first, self.last = 0 in indices, count - 1 in indices
        stages = stages if len(stages) > 1 else stages[0]
        self.schedule = SCHEDULES[schedule](stages, 4, loss_fn=lambda out, _: out.sum())
        self.optimizer = torch.optim.SGD(self.parts.parameters(), lr=0.1)

    def shapes(self, index, given):
        if not given:
            return {}
        sizes = {"input_args": (1 + index) * 1024, "output_args": (2 + index) * 1024}
        return {name: torch.empty(2, size, device="cuda", requires_grad=True) for name, size in sizes.items()}

    def step(self, batch):
        batch = batch.cuda()
        args = (batch,) if self.first else ()
        self.schedule.step(*args, **({"target": batch} if self.last else {}), return_outputs=False)
        self.optimizer.step()
        self.optimizer.zero_grad()
"""


def planned(folder: Path, rank: int, schedule: str = "gpipe", ranks: int = 3, **arguments: object) -> Trace:
    """The trace of a rank."""
    file = folder / "script.py"
    file.write_text(SCRIPT, encoding="utf-8")
    options = {"inputs": [TensorSpec((1024,))], "world_size": ranks, "rank": rank}
    given = (("schedule", schedule), *arguments.items())
    return record(resolve_job(f"{file}:Trainer", {}, model_args=given, **options), 8, AMPERE)


def sizes(trace: Trace) -> list[int]:
    """The sizes of all blocks."""
    return [event.size_bytes for event in trace.events if isinstance(event, Alloc)]


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(3))
def test_a_stage_receives_what_the_one_before_it_sends(tmp_path: Path, rank: int) -> None:
    trace = planned(tmp_path, rank)
    validate(trace)
    weights = [
        e.size_bytes for e in trace.events if isinstance(e, Alloc) and e.category is Category.PARAMETER
    ]
    assert weights == [1024 * (1 + rank) * 1024 * (2 + rank) * 4]
    received = 2 * 1024 * (1 + rank) * 4  # a micro-batch of two rows
    assert sizes(trace).count(received) >= (4 if rank else 0)
    assert not trace.unknown_ops
    assert not distributed.is_initialized()


@pytest.mark.slow
def test_a_stage_is_planned_alike_beside_a_thread(tmp_path: Path) -> None:
    """torch compares its sends and receives by identity, also in a process with other threads."""
    quiet = sizes(planned(tmp_path, 1))
    end = Event()
    thread = Thread(target=end.wait)
    thread.start()
    try:
        assert sizes(planned(tmp_path, 1)) == quiet
    finally:
        end.set()
        thread.join()


@pytest.mark.slow
def test_stages_of_one_rank_answer_each_other(tmp_path: Path) -> None:
    for schedule in ("looped", "zbv"):
        for rank in range(2):
            validate(planned(tmp_path, rank, schedule, 2))


@pytest.mark.slow
def test_shapes_that_the_file_gives_spare_the_first_pass(tmp_path: Path) -> None:
    inferred, given = (len(planned(tmp_path, 1, given=flag).events) for flag in (False, True))
    assert given < inferred


@pytest.mark.slow
def test_1f1b_keeps_fewer_micro_batches_than_gpipe_on_the_last_rank(tmp_path: Path) -> None:
    def most(schedule: str) -> int:
        return replay_trace(planned(tmp_path, 2, schedule), UNLIMITED).peak_allocated_bytes

    assert most("1f1b") < most("gpipe")
