"""The number of a model's repeated blocks."""

from msgspec import Struct

from planner.jobs.job import Job


class Depth(Struct, frozen=True):
    """The number of a model's repeated blocks, and the argument that sets it."""

    argument: str
    blocks: int

    def at(self, job: Job, blocks: int) -> Job:
        """Return the job with the number of repeated blocks set to `blocks`."""
        others = tuple(pair for pair in job.model.args if pair[0] != self.argument)
        return job.replace(model_args=(*others, (self.argument, blocks)))
