"""Plan one rank of a script that sets up its process group and shards its model by itself."""

from collections.abc import Iterator
from contextlib import contextmanager

from planner.capture.cuda.devices import Placement
from planner.capture.distributed.pipeline import Stages
from planner.capture.techniques.technique import Technique
from planner.jobs import Job


def _is_used(job: Job) -> bool:
    is_rank = bool(job.world_size or job.rank)
    return is_rank and not (job.fsdp or job.tp or job.fsdp_arg or job.deepspeed)


def _check(job: Job) -> None:
    from planner.capture.distributed.user_code import check_launched

    check_launched(job)


@contextmanager
def _open_process(job: Job, placement: Placement, stages: Stages) -> Iterator[None]:
    from planner.capture.distributed.process_group import process_group
    from planner.capture.distributed.user_code import as_launched

    ranks, rank = job.world_size, job.rank
    with (
        process_group(ranks, placement.streams, lambda tensor: placement.on_resize(tensor), rank),
        as_launched(ranks, rank, stages),
    ):
        yield


LAUNCHED_RANK = Technique(_is_used, prepare=_check, open_process=_open_process)
