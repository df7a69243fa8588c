"""`planner.estimate`: the memory of one batch size."""

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Unpack, overload

from planner.api.request.options import Options
from planner.api.request.ranks import Ranks
from planner.api.request.request import Model, open_request
from planner.api.request.varying import VaryingResult, estimate_of_varying, is_varying, open_any_request
from planner.jobs import split_model
from planner.planning import Estimate
from planner.planning.estimators import Method, find_method, reject_unsupported_options, takes_loss
from planner.program import Outcome
from planner.report import Report, Result, report_of

if TYPE_CHECKING:
    from planner.planning.estimators import StaticEstimate


@dataclass(frozen=True, slots=True)
class EstimateResult(Result):
    """The memory of one batch size. `str` gives the text report."""

    estimate: Estimate
    import_seconds: float

    @property
    def fits(self) -> Outcome:
        """Return whether the batch fits: `yes`, `with_retries` or `no`. `no` is false as a condition."""
        return self.estimate.outcome

    def _report(self) -> Report:
        from planner.report import estimate_document, estimate_to_json

        return report_of(estimate_document, estimate_to_json, self.estimate, self.import_seconds)


@dataclass(frozen=True, slots=True)
class StaticEstimateResult(Result):
    """The memory of one batch size by a method other than the trace. `str` gives the text report."""

    estimate: "StaticEstimate"
    import_seconds: float

    @property
    def fits(self) -> Outcome:
        """Return whether the batch fits: `yes` or `no`. `no` is false as a condition."""
        return Outcome.FITS if self.estimate.fits else Outcome.DOES_NOT_FIT

    def _report(self) -> Report:
        from planner.report import static_estimate_document, static_estimate_to_json

        return report_of(
            static_estimate_document, static_estimate_to_json, self.estimate, self.import_seconds
        )


@overload
def estimate(
    model: Model | None = None, batch: int | None = None, **options: Unpack[Options]
) -> EstimateResult | VaryingResult: ...


@overload
def estimate(
    model: Model | None = None, batch: int | None = None, *, method: str | None, **options: Unpack[Options]
) -> EstimateResult | VaryingResult | StaticEstimateResult: ...


def estimate(
    model: Model | None = None,
    batch: int | None = None,
    *,
    method: str | None = None,
    **options: Unpack[Options],
) -> EstimateResult | VaryingResult | StaticEstimateResult:
    """Return the memory of one batch size of a model, and whether the batch fits.

    Without a GPU, the memory is unlimited. `model` is as for `max_batch`. `batch` defaults to the batch size
    of the catalogue's entry or of the trace file. `method` is one of `planner.planning.estimators.Method`.
    Raises the errors of `planner.errors`; that the batch does not fit is a result.
    """
    chosen = find_method(method)
    if chosen is not Method.TRACE:
        return _estimate_without_trace(chosen, model, batch, options)
    request = open_any_request(model, options, batch)
    if is_varying(request):
        return estimate_of_varying(request)
    size, ranks = request.batch, Ranks(request)
    ranks.programs(ranks.first)
    opened = perf_counter()
    request.on_progress(f"tracing batch {size}")
    estimate = ranks.estimate(size)
    result = EstimateResult(estimate, opened - request.start)
    rank = estimate.job.sharding.rank
    ranks.request_of(rank).save_trace(result, size, ranks.programs(rank))
    return result


def _estimate_without_trace(
    method: Method, model: Model | None, batch: int | None, options: Options
) -> StaticEstimateResult:
    plain = options_of_method(method, model, options)
    from planner.planning.estimators import model_builder, run_estimator

    request = open_request(model, plain, batch, command="another method than the trace")
    job, size = request.job, request.batch
    build = model_builder(job, request.factory, request.on_progress)
    import_seconds = perf_counter() - request.start
    estimate = run_estimator(method, job, size, request.budget, build, request.on_progress)
    return StaticEstimateResult(estimate, import_seconds)


def options_of_method(method: Method, model: Model | None, options: Options) -> Options:
    """Return the options of a caller, adapted to a method other than the trace.

    Calibration is turned off. A model of the user needs no target if the method takes no account of the loss.
    Raises UsageError for an option that the method does not support.
    """
    reject_unsupported_options(method, options)
    is_own = callable(model) or (isinstance(model, str) and split_model(model).source == "file")
    if is_own and not takes_loss(method):
        options = {**options, "loss": "sum"}
    return {**options, "no_calibration": True}
