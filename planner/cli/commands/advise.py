"""The command `planner advise`."""

from typing import Any

from planner.cli.options import CALIBRATIONS, CLUSTER, DEVICE, JOB, Answer, Batch, with_options
from planner.errors import UsageError
from planner.program import OnProgress


@with_options(JOB, DEVICE, CALIBRATIONS, CLUSTER)
def advise_command(options: dict[str, Any], on_progress: OnProgress, batch: Batch) -> Answer:
    """Find the smallest changes to the recipe that make a batch fit, or the splits that fit a cluster."""
    question = {name: value for name in CLUSTER if (value := options.pop(name)) is not None}
    if question:
        if batch is not None:
            raise UsageError("--batch: not with --cluster; --global-batch is that of all GPUs together")
        from planner import advise_cluster

        result = advise_cluster(on_progress=on_progress, **question, **options)
        return result, result.fits
    from planner import advise

    advice = advise(batch=batch, on_progress=on_progress, **options)
    return advice, bool(advice.possible)
