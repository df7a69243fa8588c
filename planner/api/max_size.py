"""`planner.max_size`: the largest size of samples that fits a GPU.

The batch size is fixed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Unpack

from msgspec.structs import replace

from planner.api.request.budget import require_memory_limit
from planner.api.request.options import Options
from planner.api.request.request import Model, open_request
from planner.errors import UsageError
from planner.jobs import Job, Size, at_size, size_ranges, split_model
from planner.planning import CaptureMode, SizePlan, complete_from_library, find_max_size, sizes_between
from planner.program import TraceSource
from planner.report import Report, Result, report_of

_SMALLEST_BATCH = 2  # the smallest batch of nnU-Net's planner
_OF_RUNS = ("sizes", "batching", "run_steps", "seed")  # options of runs on samples of many sizes


@dataclass(frozen=True, slots=True)
class MaxSizeResult(Result):
    """The largest size of samples that fits a GPU. `str` gives the text report."""

    plan: SizePlan
    import_seconds: float

    @property
    def max_size(self) -> Size | None:
        """Return the largest size that fits, or None if no size fits.

        The size is a number for each range of the inputs, or nnU-Net's patch.
        """
        return self.plan.largest

    @property
    def comfortable_size(self) -> Size | None:
        """Return the largest size that fits without releasing cached memory, or None."""
        return self.plan.comfortable

    @property
    def answer_size(self) -> Size | None:
        """Return `comfortable_size`, or `max_size` if `comfortable_size` is None.

        The report gives this size first.
        """
        return self.comfortable_size or self.max_size

    def _report(self) -> Report:
        from planner.report import max_size_document, max_size_to_json

        return report_of(max_size_document, max_size_to_json, self.plan, self.import_seconds)


def max_size(
    model: Model | None = None, batch: int | None = None, **options: Unpack[Options]
) -> MaxSizeResult:
    """Return the largest size of samples with which a batch fits a GPU.

    The inputs name the range to search, such as `input="input_ids=128..32768:int64"`; `pad_to` is its step.
    For `nnunet:PLANS.json` the answer is the largest patch, with the network that nnU-Net's planner gives it;
    the batch size is 2 by default. Raises the errors of `planner.errors`; that nothing fits is a result.
    """
    require_memory_limit(options)
    request = open_request(model, options, batch, command="max-size", check_job=_check)
    is_nnunet = _is_nnunet(request.job)
    if is_nnunet and request.chosen_batch is None:
        request = replace(request, chosen_batch=_SMALLEST_BATCH)
    job, size, target = request.job, request.batch, request.budget.device.target
    sizes, job_at = _patches(job) if is_nnunet else (sizes_between(job), lambda each: at_size(job, each))

    def open_at(own: Job) -> TraceSource:
        request.on_progress(f"tracing {own.samples.inputs[0]}")
        programs = request.programs(CaptureMode.RUNS, own)
        return lambda batch: programs.trace(batch, target)

    import_seconds = perf_counter() - request.start
    plan = find_max_size(job, request.budget, size, sizes, job_at, open_at)
    return MaxSizeResult(plan, import_seconds)


def _patches(job: Job) -> tuple[tuple[Size, ...], Callable[[Size], Job]]:
    """Return patch sizes from nnU-Net's planner, and a function that returns the job for a patch size."""
    from planner.capture import planned_patches

    kept = tuple(pair for pair in job.model.args if pair[0] not in ("patch_size", "replan"))

    def job_at(patch: Size) -> Job:
        arguments = (*kept, ("patch_size", patch), ("replan", True))
        return complete_from_library(job.replace(model_args=arguments, inputs=()))

    return planned_patches(job), job_at


def _is_nnunet(job: Job) -> bool:
    return split_model(job.model.origin).source == "nnunet"


def _check(job: Job) -> None:
    for name in _OF_RUNS:
        if not job.has_default(name):
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag}: max-size plans batches whose samples all have one size; remove it")
    if not _is_nnunet(job) and not size_ranges(job):
        raise UsageError(
            f"{job.model.name}: max-size needs the sizes to search; give a range, such as "
            "--input input_ids=128..32768:int64 or --input 3x64..2048x64..2048"
        )
