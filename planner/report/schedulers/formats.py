"""Convert a table of GPUs to a request for the scheduler that --format names."""

from collections.abc import Callable

from planner.errors import UsageError
from planner.planning import ClusterTable, FleetTable
from planner.report.schedulers.kubernetes import kubernetes_text
from planner.report.schedulers.need import Request, comment, request_of_clusters, request_of_fleet
from planner.report.schedulers.ray import ray_text
from planner.report.schedulers.skypilot import skypilot_text
from planner.report.schedulers.slurm import slurm_text

FORMATS: dict[str, Callable[[Request], str]] = {
    "k8s": kubernetes_text,
    "ray": ray_text,
    "skypilot": skypilot_text,
    "slurm": slurm_text,
}


def scheduler_text(table: FleetTable | ClusterTable, scheduler: str) -> str:
    """Return a request for any of the GPUs that run the job, in a scheduler's format.

    It is only a comment if no GPU runs the job. Raises UsageError for an unknown scheduler.
    """
    if scheduler not in FORMATS:
        raise UsageError(f"--format {scheduler}: give one of {', '.join(FORMATS)}")
    request = request_of_fleet(table) if isinstance(table, FleetTable) else request_of_clusters(table)
    if not request.needs:
        return comment([f"{request.title}: none of the GPUs runs it"])
    return FORMATS[scheduler](request)
