"""`planner.advise`: the smallest changes to a recipe that make a batch fit."""

from dataclasses import dataclass
from functools import cache
from time import perf_counter
from typing import Unpack

from msgspec.structs import replace

from planner.api.request.budget import require_memory_limit
from planner.api.request.options import Options
from planner.api.request.request import Model, Request
from planner.api.request.varying import is_varying, open_any_request, open_sized_programs
from planner.jobs import Job, load_distribution
from planner.planning import (
    Advice,
    CaptureMode,
    SizedPrograms,
    TrainingConfig,
    VaryingAdvice,
    advise as advise_on,
    advise_varying,
    open_traces,
)
from planner.program import TraceSource
from planner.report import Report, Result, report_of


@dataclass(frozen=True, slots=True)
class AdviceResult(Result):
    """The smallest sets of changes to a training recipe that make a batch fit.

    `str` gives the text report.
    """

    advice: Advice
    import_seconds: float

    @property
    def possible(self) -> bool:
        """Return whether the batch fits unchanged or with a set of changes."""
        return self.advice.unchanged.fits or bool(self.advice.sets)

    def _report(self) -> Report:
        from planner.report import advice_document, advice_to_json

        return report_of(advice_document, advice_to_json, self.advice, self.import_seconds)


@dataclass(frozen=True, slots=True)
class VaryingAdviceResult(Result):
    """For samples of varying sizes: the largest batch, or whether a batch fits, with each change to a recipe.

    `str` gives the text report.
    """

    advice: VaryingAdvice
    import_seconds: float

    @property
    def possible(self) -> bool:
        """Return whether the batch, or any batch if none was given, fits unchanged or with changes."""
        advice = self.advice
        attempts = (advice.unchanged, *advice.singles, *filter(None, (advice.together,)))
        return any(one.fits if advice.batch else one.side.largest > 0 for one in attempts)

    def _report(self) -> Report:
        from planner.report import varying_advice_document, varying_advice_to_json

        return report_of(varying_advice_document, varying_advice_to_json, self.advice, self.import_seconds)


def advise(
    model: Model | None = None, batch: int | None = None, **options: Unpack[Options]
) -> AdviceResult | VaryingAdviceResult:
    """Return the smallest sets of changes that make a batch of a model fit a GPU.

    `model`, `batch` and the options are as for `planner.estimate`; a GPU or a memory limit is required. Each
    set of changes is traced and replayed. If samples have varying sizes, each change is simulated separately,
    and `batch` may be omitted. Raises the errors of `planner.errors`; that no change helps is a result.
    """
    require_memory_limit(options)
    request = open_any_request(model, options, batch, command="advise")
    if is_varying(request):
        return _advise_varying(request)
    target, on_progress = request.budget.device.target, request.on_progress
    captured = cache(
        lambda job: cache(open_traces(job, target, on_progress, request.factory, CaptureMode.RUNS))
    )

    def traces_of(training: TrainingConfig) -> TraceSource:
        return captured(training.job)

    training = TrainingConfig(request.job, request.batch, request.budget.limits.config)
    traces_of(training)  # imports the libraries
    import_seconds = perf_counter() - request.start
    return AdviceResult(advise_on(training, request.budget, traces_of, on_progress), import_seconds)


def _advise_varying(request: Request) -> VaryingAdviceResult:
    programs = open_sized_programs(request)
    imported = perf_counter() - request.start

    def open_programs(job: Job) -> SizedPrograms:
        sizes = load_distribution(job)
        return programs.with_job(job, sizes) or open_sized_programs(replace(request, job=job))

    batch = None if request.chosen_batch is None else request.batch
    advice = advise_varying(request.job, request.budget, batch, open_programs, request.on_progress)
    return VaryingAdviceResult(advice, imported)
