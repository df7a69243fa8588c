"""`planner compare` for Python: the estimates of one batch by all methods."""

from dataclasses import dataclass
from time import perf_counter
from typing import Unpack

from planner.allocator import config_of_torch, parse_alloc_conf
from planner.api.request.budget import calibration_query, stored_calibrations
from planner.api.request.options import Options
from planner.api.request.request import Model, open_request
from planner.hardware import GENERIC_CAPABILITY, Budget, with_config
from planner.hardware.calibration import find_run
from planner.jobs import PUBLISHED, CatalogueEntry, Job, load_catalogue
from planner.planning import estimate_batch, open_traces, with_last_batch
from planner.planning.estimators import (
    Comparison,
    Measured,
    ResidentModel,
    compare as put_side_by_side,
    find_measured,
    load_measured,
    measured_by_run,
    model_builder,
    resident_bytes_after,
    run_estimators,
)
from planner.program import OnProgress, Target, ignore_progress
from planner.report import Report, Result, report_of


@dataclass(frozen=True, slots=True)
class CompareResult(Result):
    """The estimates of a batch's memory by all methods, and the measured value if one is stored.

    `str` gives the text report.
    """

    comparison: Comparison

    def _report(self) -> Report:
        from planner.report import comparison_document, comparison_to_json

        return report_of(comparison_document, comparison_to_json, self.comparison)


def compare(
    model: Model | None = None, batch: int | None = None, **options: Unpack[Options]
) -> CompareResult:
    """Return the estimates of the memory of one batch size by every method.

    The measured value is included if one is stored: a calibration's run on the GPU of the options, else a
    published value. Options are as for `planner.estimate` without `trace`, `save_trace` and `isolate`. If an
    estimator fails, its row has the reason. Raises the errors of `planner.errors` if the planner's own trace
    fails.
    """
    request = open_request(model, options, batch, command="compare")
    job, size, on_progress = request.job, request.batch, request.on_progress
    start = perf_counter()
    stored = stored_calibrations(request.budget, options)
    run = find_run(stored, calibration_query(request.budget, job, options), size)
    measured = (run and measured_by_run(run)) or _measured(job, size, on_progress)
    budget = _as_measured(request.budget, measured, options)
    traces = open_traces(job, budget.device.target, on_progress, request.factory)
    build = model_builder(job, request.factory, on_progress)
    on_progress(f"tracing batch {size}")
    own = estimate_batch(job, with_last_batch(job, size, traces), budget)
    others = run_estimators(job, size, budget, build, on_progress)
    return CompareResult(put_side_by_side(own, others, measured, perf_counter() - start))


def _as_measured(budget: Budget, measured: Measured | str, options: Options) -> Budget:
    """Return the budget with the allocator defaults of the torch version under which a value was measured.

    The option `alloc_conf` still applies. The budget is returned unchanged if `measured` is the reason why no
    value is stored.
    """
    if isinstance(measured, str):
        return budget
    defaults = config_of_torch(measured.source.versions.get("torch", ""))
    config = parse_alloc_conf(options.get("alloc_conf") or "", defaults)
    return with_config(budget, config)


def _measured(job: Job, batch: int, on_progress: OnProgress) -> Measured | str:
    """Return the stored measured peak of a job's batch, or the reason why none is stored.

    Peaks are stored only for jobs of the catalogue.
    """
    catalogue = load_catalogue()
    entry = catalogue.get(job.model.name)
    if entry is None or entry.job != job:
        return "measured values are stored only for the unchanged models of models.yaml"

    def measure_resident(name: str) -> ResidentModel:
        return _resident_model(name, catalogue[name], on_progress)

    measured = find_measured(load_measured(), job.model.name, batch, measure_resident)
    return measured or f"no measured value is stored for {job.model.name} at batch {batch}"


def _resident_model(name: str, entry: CatalogueEntry, on_progress: OnProgress) -> ResidentModel:
    on_progress(f"tracing {name}, which stayed on the GPU")
    job = entry.job.replace(cudnn=PUBLISHED)  # the measured processes had cuDNN 8.9
    tracer = open_traces(job, Target.for_capability(GENERIC_CAPABILITY), ignore_progress)
    return ResidentModel(name, resident_bytes_after(tracer(entry.batch)))
