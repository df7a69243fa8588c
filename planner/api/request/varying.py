"""Plan jobs whose samples have varying sizes, for `max_batch` and `estimate`."""

from dataclasses import dataclass
from time import perf_counter

from planner.api.request.options import Options
from planner.api.request.request import Model, Request, answers_folder, isolation_limit, open_request
from planner.errors import UsageError
from planner.hardware import Budget
from planner.jobs import Job, check_sizes, load_distribution, size_ranges
from planner.planning import (
    SizedPrograms,
    VaryingPlan,
    check_varying,
    estimate_varying,
    find_varying_batch,
)
from planner.program import Outcome
from planner.report import Report, Result, report_of


@dataclass(frozen=True, slots=True)
class VaryingResult(Result):
    """The largest batch, or the memory of one batch size, for samples of varying sizes.

    `str` gives the text report. `max_batch` returns the former, `estimate` the latter.
    """

    plan: VaryingPlan
    import_seconds: float

    @property
    def answer_batch(self) -> int:
        """Return the largest batch that fits with the configured allocator, or 0."""
        return self.plan.sides[0].largest

    @property
    def max_batch(self) -> int:
        """Return `answer_batch`."""
        return self.answer_batch

    @property
    def fits(self) -> Outcome:
        """Return whether the estimated batch, or any batch, fits: `yes` or `no`.

        `no` is false as a condition.
        """
        return Outcome.FITS if self.answer_batch else Outcome.DOES_NOT_FIT

    def _report(self) -> Report:
        from planner.report import varying_document, varying_to_json

        return report_of(varying_document, varying_to_json, self.plan, self.import_seconds)


def open_any_request(
    model: Model | None, options: Options, batch: int | None = None, *, command: str = ""
) -> Request:
    """Return the request for a model whose samples may have varying sizes. Raises as `open_request`."""
    return open_request(model, options, batch, command=command, check_job=check_any_sizes)


def check_any_sizes(job: Job) -> None:
    """Raise UsageError for options that contradict the sample sizes of a job."""
    check_sizes(job)
    if size_ranges(job):
        check_varying(job)


def is_varying(request: Request) -> bool:
    """Return whether the samples of a request have varying sizes."""
    return bool(size_ranges(request.job))


def max_batch_of_varying(request: Request, multiple_of: int, no_retries: bool) -> VaryingResult:
    """Return the largest batch that fits, for samples of varying sizes.

    Raises the errors of `planner.errors`.
    """
    if no_retries:
        raise UsageError(
            "--no-retries: batches of other sizes release cached memory now and then; remove it, or give "
            "one size"
        )
    programs = open_sized_programs(request)
    imported = perf_counter() - request.start
    return VaryingResult(find_varying_batch(request.job, request.budget, programs, multiple_of), imported)


def estimate_of_varying(request: Request) -> VaryingResult:
    """Return the memory of one batch size, and whether it fits, for samples of varying sizes.

    Raises the errors of `planner.errors`.
    """
    programs, batch = open_sized_programs(request), request.batch
    imported = perf_counter() - request.start
    return VaryingResult(estimate_varying(request.job, request.budget, programs, batch), imported)


def open_sized_programs(request: Request, budget: Budget | None = None) -> SizedPrograms:
    """Return an object that makes traces at any sample size, for the GPU of `budget` or of the request.

    Raises UsageError for options that require samples of one size.
    """
    if isolation_limit(request.options) is not None or request.options.get("save_trace") is not None:
        flag = "--save-trace" if request.options.get("save_trace") is not None else "--isolate"
        raise UsageError(f"{flag}: not with samples of many sizes; remove it, or give one size")
    return SizedPrograms(
        request.job,
        load_distribution(request.job),
        (budget or request.budget).device.target,
        request.on_progress,
        request.factory,
        answers_folder(request.options),
    )
