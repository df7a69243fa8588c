"""The rows of a check's answer: a job's estimate on a GPU, or the reason why there is none."""

from msgspec import Struct

from planner.hardware import Device
from planner.planning.check.config import CheckJob
from planner.planning.check.verdict import Judgement
from planner.planning.estimate import Estimate


class CheckRow(Struct, frozen=True):
    """The estimate and verdict of a job on one of its GPUs, or under its budget alone if it has no GPUs."""

    job: CheckJob
    device: Device | None
    estimate: Estimate
    judgement: Judgement
    largest_batch: int | None  # on the GPU, without retries if possible; None if it was not searched

    @property
    def place(self) -> str:
        """Return the name of the GPU, or `any GPU`."""
        return "any GPU" if self.device is None else self.device.name


class CheckFailure(Struct, frozen=True):
    """A job that could not be planned, and the reason."""

    job: CheckJob
    why: str
