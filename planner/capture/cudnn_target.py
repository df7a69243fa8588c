"""Give the target of one job's workspace rules the version of torch and the cuDNN library of the job."""

from typing import TYPE_CHECKING

from msgspec.structs import replace

from planner.jobs import Job
from planner.program import Target, torch_version_of

if TYPE_CHECKING:
    from planner.hardware.cudnn import Cudnn


def equip(target: Target, job: Job) -> Target:
    """Return the target with the job's version of torch and the library that it queries for workspaces.

    Raises UsageError.
    """
    target = replace(target, torch=torch_version_of(job.torch))
    if not job.cudnn or target.conv_workspace_query is not None:
        return target
    library = _library_of(job)
    return replace(
        target, conv_workspace_query=library.benchmarked if job.cudnn_benchmark else library.workspaces
    )


def notes_on_cudnn(job: Job, capability: tuple[int, int]) -> tuple[str, ...]:
    """Return notes on the library's answers for a run of the job on such a GPU."""
    if not job.cudnn:
        return ()
    library = _library_of(job)
    if capability in library.silent:
        place = "compute capability {}.{}".format(*capability)
        return (
            f"cuDNN {library.version} does not answer for {place}: no workspaces of convolutions are counted",
        )
    note = f"convolutions take the workspaces that cuDNN {library.version} requests"
    if job.cudnn_benchmark:
        note += ": the largest while it times its engines, then that of its first choice"
    if library.lacks:
        return (note, f"cuDNN's engines that are built on cuBLASLt are left out: {library.lacks}")
    return (note,)


def _library_of(job: Job) -> "Cudnn":
    from planner.emulator import open_cudnn_with_cublaslt

    return open_cudnn_with_cublaslt(job.cudnn)
