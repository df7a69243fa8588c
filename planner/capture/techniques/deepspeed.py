"""Train with DeepSpeed's engine."""

from collections.abc import Iterator
from contextlib import contextmanager

from planner.capture.cuda.devices import Placement
from planner.capture.distributed.pipeline import Stages
from planner.capture.techniques.technique import CapturedLoop, Notes, Technique
from planner.jobs import Job


def _import(job: Job) -> None:
    from planner.capture.distributed.deepspeed_process import import_deepspeed

    import_deepspeed()


@contextmanager
def _open_process(job: Job, placement: Placement, stages: Stages) -> Iterator[None]:
    from planner.capture.distributed.deepspeed_process import deepspeed_process

    with deepspeed_process(job.world_size, placement):
        yield


def _run(loop: CapturedLoop) -> Notes:
    from planner.capture.distributed.zero import run_zero

    return run_zero(loop.job, loop.model, loop.batch, loop.recorder)


DEEPSPEED = Technique(
    lambda job: bool(job.deepspeed), prepare=_import, open_process=_open_process, run_loop=_run
)
