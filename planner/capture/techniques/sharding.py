"""Shard a model over the ranks of `--fsdp` and `--tp`."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from planner.capture.cuda.devices import Placement
from planner.capture.distributed.pipeline import Stages
from planner.capture.distributed.sharding import check_rank, rank_count, shard_model, with_last_synced
from planner.capture.recorder.recorder import Recorder
from planner.capture.techniques.technique import Notes, Technique
from planner.errors import UsageError
from planner.jobs import Job
from planner.program import Category


def _check(job: Job) -> None:
    if not job.fsdp and job.fsdp_arg:
        raise UsageError("--fsdp-arg without --fsdp: give the number of ranks, such as --fsdp 8")
    check_rank(job)


@contextmanager
def _open_process(job: Job, placement: Placement, stages: Stages) -> Iterator[None]:
    from planner.capture.distributed.process_group import process_group

    with process_group(
        rank_count(job), placement.streams, lambda tensor: placement.on_resize(tensor), job.rank
    ):
        yield


@contextmanager
def _open_model(model: nn.Module, job: Job, recorder: Recorder) -> Iterator[Notes]:
    yield shard_model(model, job, recorder)


def _keep_parameters(parameters: Iterable[nn.Parameter], recorder: Recorder) -> None:
    """Set the category of parameters, whose parts FSDP may have copied."""
    for parameter in parameters:
        recorder.set_category(parameter, Category.PARAMETER)


SHARDING = Technique(
    lambda job: bool(job.fsdp or job.tp or job.fsdp_arg),
    prepare=_check,
    open_process=_open_process,
    open_model=_open_model,
    change_loader=with_last_synced,
    on_phase=_keep_parameters,
)
