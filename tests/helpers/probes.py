"""A small job that probes train."""

from planner.jobs import Job, Loss, Mode, parse_tensor_spec
from tests.helpers.models import job_of


def training(**fields: object) -> Job:
    target = parse_tensor_spec("scalar:int64")
    job = job_of("3x8x8", mode=Mode.TRAIN, steps=3, loss=Loss.CROSS_ENTROPY, target=target)
    return job.replace(**fields)  # type: ignore[arg-type]
