"""`planner.max_batch`: the largest batch size that fits a GPU."""

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Unpack, overload

from msgspec.structs import replace

from planner.api.estimate import options_of_method
from planner.api.request.budget import require_memory_limit
from planner.api.request.options import Options
from planner.api.request.ranks import Ranks
from planner.api.request.request import Model, checked_multiple, open_request
from planner.api.request.varying import VaryingResult, is_varying, max_batch_of_varying, open_any_request
from planner.errors import UsageError
from planner.planning import Plan
from planner.planning.estimators import Method, find_method
from planner.report import Report, Result, report_of

if TYPE_CHECKING:
    from planner.planning.estimators import FormulaPlan


@dataclass(frozen=True, slots=True)
class MaxBatchResult(Result):
    """The largest batch size that fits a GPU. `str` gives the text report."""

    plan: Plan
    import_seconds: float

    @property
    def answer_batch(self) -> int:
        """Return `comfortable_batch`, or `max_batch` if `comfortable_batch` is 0.

        The report gives this batch size first. With `no_retries`, it is always `comfortable_batch`.
        """
        return 0 if self.plan.answer is None else self.plan.answer.run.batch

    @property
    def max_batch(self) -> int:
        """Return the largest batch size that fits, even if with retries, or 0."""
        return self.plan.search.largest

    @property
    def comfortable_batch(self) -> int:
        """Return the largest batch size that fits without releasing cached memory, or 0."""
        return self.plan.search.comfortable

    def _report(self) -> Report:
        from planner.report import plan_document, plan_to_json

        return report_of(plan_document, plan_to_json, self.plan, self.import_seconds)


@dataclass(frozen=True, slots=True)
class FormulaBatchResult(Result):
    """The largest batch size that fits a GPU by the closed formula. `str` gives the text report."""

    plan: "FormulaPlan"
    import_seconds: float

    @property
    def max_batch(self) -> int:
        """Return the largest batch size that fits, or 0 if no batch fits."""
        return self.plan.max_batch

    @property
    def answer_batch(self) -> int:
        """Return `max_batch`. The formula does not consider retries."""
        return self.plan.max_batch

    def _report(self) -> Report:
        from planner.report import formula_plan_document, formula_plan_to_json

        return report_of(formula_plan_document, formula_plan_to_json, self.plan, self.import_seconds)


@overload
def max_batch(
    model: Model | None = None,
    *,
    multiple_of: int | None = None,
    no_retries: bool | None = None,
    **options: Unpack[Options],
) -> MaxBatchResult | VaryingResult: ...


@overload
def max_batch(
    model: Model | None = None,
    *,
    method: str | None,
    multiple_of: int | None = None,
    no_retries: bool | None = None,
    **options: Unpack[Options],
) -> MaxBatchResult | VaryingResult | FormulaBatchResult: ...


def max_batch(
    model: Model | None = None,
    *,
    method: str | None = None,
    multiple_of: int | None = None,
    no_retries: bool | None = None,
    **options: Unpack[Options],
) -> MaxBatchResult | VaryingResult | FormulaBatchResult:
    """Return the largest batch size of a model that fits a GPU.

    `model` is a name as for `--model`, an `nn.Module`, which is unchanged afterwards, a callable that returns
    one, or a `Job`; with `trace` it is omitted. One of `gpu`, `gpu_mib` and `allocator_cap_mib` is required.
    `method` is "trace" or "formula". With `multiple_of`, the answer is the largest multiple of it that fits.
    With `no_retries`, a batch size for which the allocator has to release cached memory is no answer. Raises
    the errors of `planner.errors`, among them UnsavedError, which holds the result, if `save_trace` cannot be
    written; that nothing fits is a result.
    """
    multiple = checked_multiple(multiple_of)
    chosen = find_method(method, (Method.TRACE, Method.FORMULA))
    if chosen is Method.FORMULA:
        return _max_batch_by_formula(model, options, multiple, bool(no_retries))
    require_memory_limit(options)
    request = open_any_request(model, options)
    if is_varying(request):
        return max_batch_of_varying(request, multiple, bool(no_retries))
    ranks = Ranks(request)
    ranks.programs(ranks.first)
    import_seconds = perf_counter() - request.start
    plan = ranks.find_max_batch(multiple)
    result = MaxBatchResult(replace(plan, no_retries=bool(no_retries)), import_seconds)
    rank = plan.job.sharding.rank
    ranks.request_of(rank).save_trace(result, plan.search.largest or plan.search.least, ranks.programs(rank))
    return result


def _max_batch_by_formula(
    model: Model | None, options: Options, multiple: int, no_retries: bool
) -> FormulaBatchResult:
    if multiple > 1:
        raise UsageError("--multiple-of and --method formula: the formula answers for any size; leave one")
    if no_retries:
        raise UsageError("--no-retries: the formula knows no allocator; remove it, or --method")
    plain = options_of_method(Method.FORMULA, model, options)
    require_memory_limit(options)
    from planner.planning.estimators import model_builder, plan_by_formula

    request = open_request(model, plain, command="the formula")
    build = model_builder(request.job, request.factory, request.on_progress)
    import_seconds = perf_counter() - request.start
    plan = plan_by_formula(request.job, request.budget, build, request.on_progress)
    return FormulaBatchResult(plan, import_seconds)
