"""`planner advise` for Python: the smallest changes to a recipe that make a batch fit."""

from dataclasses import dataclass
from time import perf_counter
from typing import Unpack

from planner.api.budget import require_memory_limit
from planner.api.options import Options
from planner.api.request import Model, open_request
from planner.planning import Advice, TrainingConfig, advise as advise_on, open_traces
from planner.program import TraceSource
from planner.report import Result


@dataclass(frozen=True, slots=True)
class AdviceResult(Result):
    """The changes that make the batch fit; `str` gives the text report."""

    advice: Advice
    import_seconds: float

    @property
    def possible(self) -> bool:
        """Return whether the batch fits as it is or with any set of changes."""
        return self.advice.unchanged.fits or bool(self.advice.sets)


def advise(model: Model | None = None, batch: int | None = None, **options: Unpack[Options]) -> AdviceResult:
    """Return the smallest sets of changes with which a batch size of a model fits a GPU.

    `model`, `batch` and the options are as for `planner.estimate`; a GPU or a cap is needed. Each set is
    traced and replayed. Raises the errors of `planner.errors`; that nothing helps is a result.
    """
    require_memory_limit(options)
    request = open_request(model, options, batch, command="advise")
    target, on_progress = request.budget.device.target, request.on_progress

    def traces_of(training: TrainingConfig) -> TraceSource:
        return open_traces(training.job, target, on_progress, request.factory)

    training = TrainingConfig(request.job, request.batch, request.budget.limits.config)
    traces_of(training)  # imports what is needed
    import_seconds = perf_counter() - request.start
    return AdviceResult(advise_on(training, request.budget, traces_of, on_progress), import_seconds)
