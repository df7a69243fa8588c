"""The chip as the rules of one job see it."""

from dataclasses import replace

from planner.chip import Chip
from planner.job import Job


def equip(chip: Chip, job: Job) -> Chip:
    """With the library that the job asks for the workspaces of convolutions. Raises UsageError."""
    if not job.cudnn or chip.cudnn is not None:
        return chip
    from planner.cudnn import open_cudnn

    library = open_cudnn(job.cudnn)
    return replace(chip, cudnn=library.benchmarked if job.cudnn_benchmark else library.workspaces)


def notes_on_cudnn(job: Job, capability: tuple[int, int]) -> tuple[str, ...]:
    """What is to be said of whatever is concluded from a run of the job on such a GPU."""
    if not job.cudnn:
        return ()
    from planner.cudnn import open_cudnn

    library = open_cudnn(job.cudnn)
    if capability in library.silent:
        known = "compute capability {}.{}".format(*capability)
        return (
            f"cuDNN {library.version} does not answer for {known}: no workspaces of convolutions are counted",
        )
    told = f"convolutions take the workspaces that cuDNN {library.version} asks for"
    if job.cudnn_benchmark:
        return (f"{told}: the largest while it times its engines, then that of its first choice",)
    return (told,)
