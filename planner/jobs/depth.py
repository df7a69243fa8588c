"""The number of a model's repeated blocks."""

from msgspec import Struct
from msgspec.structs import replace

from planner.jobs.job import Job


class Depth(Struct, frozen=True):
    """The number of a model's repeated blocks, and the argument that sets it."""

    argument: str
    blocks: int

    def at(self, job: Job, blocks: int) -> Job:
        """Return the job with another number of blocks."""
        others = tuple(pair for pair in job.model_args if pair[0] != self.argument)
        return replace(job, model_args=(*others, (self.argument, blocks)))
