"""The planner for Python: `max_batch` and `estimate`, with the options of the command line as keywords.

Nothing here imports torch before the first trace, nor ever the terminal's libraries.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from time import perf_counter
from typing import Any, TypedDict, Unpack

from planner.allocator_rules import parse_alloc_conf
from planner.budget import Budget, make_budget
from planner.catalogue import load_catalogue
from planner.device import LARGEST_TOTAL_MIB, MIB, Device, find_device, generic_device, unlimited_device
from planner.errors import UsageError
from planner.job import Job, TensorSpec, check_count, freeze, parse_model_arg, parse_tensor_spec, split_model
from planner.plan import Estimate, Plan, Tell, Tracer, plan_max_batch
from planner.plan import estimate as estimate_batch
from planner.resolve import JobOptions, complete_job, merge_job, resolve_job
from planner.search import LARGEST_BATCH
from planner.workload import Factory, Workload, load_workload, save_workload, trace_workload

Sample = str | TensorSpec
Model = str | Job | Factory


class Options(TypedDict, total=False):
    """The options of the command line; None counts as not given."""

    model_arg: Mapping[str, object] | Sequence[str] | None  # {"num_classes": 10}, or ["num_classes=10"]
    input: Sample | Sequence[Sample] | None  # one sample, without the batch dimension
    target: Sample | None
    loss: str | None
    mode: str | None
    optimizer: str | None
    optimizer_impl: str | None
    zero_grad: str | None
    keep_grads: bool | None
    steps: int | None
    models: str | PathLike[str] | None  # a catalogue in place of the planner's own
    gpu: str | Device | None
    gpu_mib: int | None
    allocator_cap_mib: int | None
    alloc_conf: str | None
    confidence: float | None  # default 0.99
    trace: str | PathLike[str] | None  # plan from this file in place of a model
    save_trace: str | PathLike[str] | None
    tell: Tell | None  # hears one short line for each thing that takes time


DEFAULT_CONFIDENCE = 0.99
_OF_JOB = (
    *("model_arg", "input", "target", "loss", "mode", "optimizer", "optimizer_impl", "zero_grad"),
    *("keep_grads", "steps", "models"),
)


@dataclass(frozen=True, slots=True)
class MaxBatchResult:
    """The largest batch size; `str` gives the text report."""

    plan: Plan
    import_seconds: float

    @property
    def max_batch(self) -> int:
        """0 where not even 1 fits."""
        return self.plan.search.largest

    @property
    def comfortable_batch(self) -> int:
        """The largest batch size that fits without releasing cached memory on the way."""
        return self.plan.search.comfortable

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of `planner max-batch`."""
        from planner.report.as_json import plan_to_json

        return plan_to_json(self.plan, self.import_seconds)

    def __str__(self) -> str:
        from planner.report.text import max_batch_text

        return max_batch_text(self.plan, self.import_seconds)


@dataclass(frozen=True, slots=True)
class EstimateResult:
    """The memory of one batch size; `str` gives the text report."""

    estimate: Estimate
    import_seconds: float

    @property
    def fits(self) -> str:
        """`yes`, `with_retries` or `no`."""
        return self.estimate.outcome.value

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of `planner estimate`."""
        from planner.report.as_json import estimate_to_json

        return estimate_to_json(self.estimate, self.import_seconds)

    def __str__(self) -> str:
        from planner.report.text import estimate_text

        return estimate_text(self.estimate, self.import_seconds)


def max_batch(model: Model | None = None, **options: Unpack[Options]) -> MaxBatchResult:
    """The largest batch size of a model that fits a GPU.

    `model` is a name as `--model` takes it, a callable that returns an `nn.Module`, or a `Job`; with `trace`
    it is left away. One of `gpu`, `gpu_mib` and `allocator_cap_mib` is needed. Raises the errors of
    `planner.errors`; that nothing fits is a result.
    """
    if all(options.get(name) is None for name in ("gpu", "gpu_mib", "allocator_cap_mib")):
        raise UsageError("no GPU to fit: give --gpu NAME, --gpu-mib N or --allocator-cap-mib N")
    budget = _budget(options)
    workload = _workload(model, options, budget)
    tell = options.get("tell") or _silent
    start = perf_counter()
    tracer = workload.open(tell)
    import_seconds = perf_counter() - start
    plan = plan_max_batch(workload.job, budget, tracer, tell)
    _save(workload, tracer, plan.search.largest or 1, options)
    return MaxBatchResult(plan, import_seconds)


def estimate(
    model: Model | None = None, batch: int | None = None, **options: Unpack[Options]
) -> EstimateResult:
    """The memory of one batch size of a model, and whether it fits; without a GPU, on one without end.

    `model` is as for `max_batch`. `batch` is by default that of the catalogue or of the trace file. Raises
    the errors of `planner.errors`; that the batch does not fit is a result.
    """
    if batch is not None:
        check_count("--batch", batch, LARGEST_BATCH)
    budget = _budget(options)
    workload = _workload(model, options, budget)
    size = batch or workload.batch
    if size is None:
        raise UsageError(f"{workload.job.model}: no batch size is known; give one, such as --batch 32")
    tell = options.get("tell") or _silent
    start = perf_counter()
    tracer = workload.open(tell)
    opened = perf_counter()
    tell(f"tracing batch {size}")
    trace = tracer(size)
    found = estimate_batch(workload.job, trace, size, budget, perf_counter() - opened)
    _save(workload, tracer, size, options)
    return EstimateResult(found, opened - start)


def _budget(options: Options) -> Budget:
    gpu, gpu_mib, cap_mib = options.get("gpu"), options.get("gpu_mib"), options.get("allocator_cap_mib")
    if gpu is not None and gpu_mib is not None:
        raise UsageError("--gpu and --gpu-mib: both say which GPU; give one of them")
    if cap_mib is not None:
        check_count("--allocator-cap-mib", cap_mib, LARGEST_TOTAL_MIB)
    if gpu_mib is not None:
        device = generic_device(gpu_mib)
    elif gpu is not None:
        device = gpu if isinstance(gpu, Device) else find_device(gpu)
    else:
        device = unlimited_device()
    confidence = options.get("confidence")
    return make_budget(
        device,
        DEFAULT_CONFIDENCE if confidence is None else confidence,
        parse_alloc_conf(options.get("alloc_conf") or ""),
        None if cap_mib is None else cap_mib * MIB,
    )


def _workload(model: Model | None, options: Options, budget: Budget) -> Workload:
    capability = budget.device.capability
    path = options.get("trace")
    if path is not None:
        _refuse_beside_trace(model, options)
        return load_workload(Path(path), capability)
    if model is None:
        raise UsageError("--model is missing: give a name of models.yaml, SOURCE:NAME or FILE.py:NAME")
    job, batch = _job(model, options)
    factory = model if callable(model) else None
    return trace_workload(job, batch, factory, capability)


def _refuse_beside_trace(model: Model | None, options: Options) -> None:
    given = [name for name in (*_OF_JOB, "save_trace") if options.get(name) not in (None, (), [], {}, False)]
    if model is not None or given:
        option = "model" if model is not None else given[0]
        raise UsageError(
            f"--{option.replace('_', '-')} and --trace: the trace file says that; leave one away"
        )


def _job(model: Model, options: Options) -> tuple[Job, int | None]:
    """The whole job and the batch size of its origin, None where it has none."""
    given = _job_options(options)
    path = options.get("models")
    catalogue = load_catalogue(None if path is None else Path(path))
    if isinstance(model, str):
        job = resolve_job(model, catalogue, **given)
        return job, None if split_model(model).source else catalogue[model].batch
    base = model if isinstance(model, Job) else Job(getattr(model, "__name__", type(model).__name__))
    return complete_job(merge_job(base, given)), None


def _job_options(options: Options) -> JobOptions:
    args = options.get("model_arg") or ()
    inputs = options.get("input") or ()
    target = options.get("target")
    return {
        "model_args": _model_args(args),
        "inputs": [_sample(one) for one in ([inputs] if isinstance(inputs, Sample) else inputs)],
        "target": None if target is None else _sample(target),
        "loss": options.get("loss"),
        "mode": options.get("mode"),
        "optimizer": options.get("optimizer"),
        "optimizer_impl": options.get("optimizer_impl"),
        "zero_grad": options.get("zero_grad"),
        "keep_grads": options.get("keep_grads"),
        "steps": options.get("steps"),
    }


def _model_args(given: Mapping[str, object] | Sequence[str]) -> list[tuple[str, Any]]:
    if isinstance(given, Mapping):
        return [
            (key, freeze(list(value) if isinstance(value, tuple) else value)) for key, value in given.items()
        ]
    return [parse_model_arg(text) for text in given]


def _sample(given: Sample) -> TensorSpec:
    return given if isinstance(given, TensorSpec) else parse_tensor_spec(given)


def _save(workload: Workload, tracer: Tracer, batch: int, options: Options) -> None:
    path = options.get("save_trace")
    if path is not None:
        save_workload(workload, tracer, batch, Path(path))


def _silent(line: str) -> None:
    """Hears the progress where nobody wants to."""
