"""`planner.max_batch`: the largest batch size that fits a GPU."""

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Unpack, overload

from msgspec.structs import replace

from planner.api.budget import require_memory_limit
from planner.api.options import Options
from planner.api.ranks import Ranks
from planner.api.request import Model, find_multiple, open_request
from planner.api.varying import VaryingResult, is_varying, max_batch_of_varying, open_any_request
from planner.errors import UsageError
from planner.planning import Plan
from planner.planning.estimators import Method, find_method, reject_unsupported_options
from planner.report import Result

if TYPE_CHECKING:
    from planner.planning.estimators import FormulaPlan


@dataclass(frozen=True, slots=True)
class MaxBatchResult(Result):
    """The largest batch size; `str` gives the text report."""

    plan: Plan
    import_seconds: float

    @property
    def answer_batch(self) -> int:
        """Return the batch size that the report leads with: `comfortable_batch`, or where no batch runs
        without retries, `max_batch`; with `no_retries`, 0 there.
        """
        return 0 if self.plan.answer is None else self.plan.answer.run.batch

    @property
    def max_batch(self) -> int:
        """Return the largest that fits at all, with retries or without; 0 where none that trains does."""
        return self.plan.search.largest

    @property
    def comfortable_batch(self) -> int:
        """Return the largest batch size that fits without releasing cached memory on the way."""
        return self.plan.search.comfortable


@dataclass(frozen=True, slots=True)
class FormulaBatchResult(Result):
    """The largest batch size by the closed formula; `str` gives the text report."""

    plan: "FormulaPlan"
    import_seconds: float

    @property
    def max_batch(self) -> int:
        """Return the largest that fits; 0 where not even 1 does."""
        return self.plan.max_batch

    @property
    def answer_batch(self) -> int:
        """Return `max_batch`: the formula knows no retries."""
        return self.plan.max_batch


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

    `model` is a name as `--model` takes it, a callable that returns an `nn.Module`, or a `Job`; with `trace`
    it is left away. One of `gpu`, `gpu_mib` and `allocator_cap_mib` is needed. `method` is "trace" or
    "formula". With `multiple_of`, the answer is the largest such multiple that fits. With `no_retries`, a
    batch size for which the allocator has to release cached memory is no answer. Raises the errors of
    `planner.errors`, among them UnsavedError, which holds the result, where `save_trace` cannot be written;
    that nothing fits is a result.
    """
    multiple = find_multiple(multiple_of)
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
    rank = plan.job.rank
    ranks.request_of(rank).save_trace(result, plan.search.largest or plan.search.least, ranks.programs(rank))
    return result


def _max_batch_by_formula(
    model: Model | None, options: Options, multiple: int, no_retries: bool
) -> FormulaBatchResult:
    if multiple > 1:
        raise UsageError("--multiple-of and --method formula: the formula answers for any size; leave one")
    if no_retries:
        raise UsageError("--no-retries: the formula knows no allocator; leave it away, or --method")
    reject_unsupported_options(Method.FORMULA, options)
    require_memory_limit(options)
    from planner.planning.estimators import open_builder, plan_by_formula

    request = open_request(model, {**options, "no_calibration": True}, command="the formula")
    build = open_builder(request.job, request.factory, request.on_progress)
    import_seconds = perf_counter() - request.start
    plan = plan_by_formula(request.job, request.budget, build, request.on_progress)
    return FormulaBatchResult(plan, import_seconds)
