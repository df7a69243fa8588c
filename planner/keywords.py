"""The keywords of `planner.api`, which are the options of the command line, as a job and a budget."""

from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from os import PathLike
from pathlib import Path
from typing import Any, TypedDict

from planner.allocator_rules import parse_alloc_conf
from planner.budget import Budget, make_budget
from planner.calibrated import Wanted, look_up
from planner.calibration_file import load_folders, search_path
from planner.catalogue import load_catalogue
from planner.device import (
    ENDLESS_BYTES,
    LARGEST_TOTAL_MIB,
    MIB,
    Device,
    find_device,
    generic_device,
    unlimited_device,
)
from planner.errors import UsageError
from planner.job import Job, TensorSpec, check_count, freeze, parse_model_arg, parse_tensor_spec, split_model
from planner.plan import Tell
from planner.resolve import JobOptions, complete_job, merge_job, resolve_job
from planner.workload import Factory, Workload, load_workload, trace_workload

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
    precision: str | None
    grad_scaler: bool | None
    backward_in_autocast: bool | None
    memory_format: str | None
    checkpoint: str | None
    accumulate: int | None
    clip_gradients: str | None
    ema: bool | None
    evaluate: bool | None
    ddp: bool | None
    ddp_bucket_view: bool | None
    freeze: str | Sequence[str] | None
    train_only: str | Sequence[str] | None
    new_tokens: int | None
    cudnn_benchmark: bool | None
    models: str | PathLike[str] | None  # a catalogue in place of the planner's own
    gpu: str | Device | None
    gpu_mib: int | None
    allocator_cap_mib: int | None
    alloc_conf: str | None
    confidence: float | None  # default 0.99
    calibrations: str | PathLike[str] | Sequence[str | PathLike[str]] | None  # folders, looked into first
    no_calibration: bool | None  # plan without any
    trace: str | PathLike[str] | None  # plan from this file in place of a model
    save_trace: str | PathLike[str] | None
    tell: Tell | None  # hears one short line for each thing that takes time


DEFAULT_CONFIDENCE = 0.99
_PLAIN: tuple[Any, ...] = (  # those that `JobOptions` takes under the same name and in the same form
    *("loss", "mode", "optimizer", "optimizer_impl", "zero_grad", "keep_grads", "steps", "precision"),
    *("grad_scaler", "backward_in_autocast", "memory_format", "checkpoint", "accumulate", "clip_gradients"),
    *("ema", "evaluate", "ddp", "ddp_bucket_view", "new_tokens", "cudnn_benchmark"),
)
_OF_JOB = ("model_arg", "input", "target", *_PLAIN, "freeze", "train_only", "models")


def budget_of(options: Options) -> Budget:
    """What the card leaves to the allocator; without a card, no end. Raises UsageError or DataFileError."""
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


def calibrate_budget(budget: Budget, job: Job, options: Options) -> Budget:
    """The budget as the nearest stored calibration corrects it; as it is where none says anything.

    Raises DataFileError for a broken calibration.
    """
    if options.get("no_calibration") or budget.device.total.value >= ENDLESS_BYTES:
        return budget
    given = options.get("calibrations") or ()
    folders = [given] if isinstance(given, str | PathLike) else given
    stored = load_folders(search_path([Path(folder) for folder in folders]))
    torch = None if options.get("trace") is not None else _installed_torch()
    wanted = Wanted(job, budget.device, torch, options.get("alloc_conf") or "")
    arena, cap = budget.arena, budget.cap_bytes
    return make_budget(budget.device, budget.confidence, arena.rules, cap, look_up(stored, wanted))


def _installed_torch() -> str | None:
    """The version that a job would be traced with, without an import."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return None


def workload_of(model: Model | None, options: Options, budget: Budget) -> Workload:
    """The job and where its traces come from. Raises UsageError or DataFileError."""
    capability = budget.device.capability
    path = options.get("trace")
    if path is not None:
        _refuse_beside_trace(model, options)
        return load_workload(Path(path), capability)
    job, batch, factory = job_of(model, options)
    return trace_workload(job, batch, factory, capability)


def _refuse_beside_trace(model: Model | None, options: Options) -> None:
    given = [name for name in (*_OF_JOB, "save_trace") if options.get(name) not in (None, (), [], {}, False)]
    if model is not None or given:
        option = "model" if model is not None else given[0]
        raise UsageError(
            f"--{option.replace('_', '-')} and --trace: the trace file says that; leave one away"
        )


def job_of(model: Model | None, options: Options) -> tuple[Job, int | None, Factory | None]:
    """The whole job, the batch size of its origin where it has one, and the factory where one is given.

    Raises UsageError or DataFileError.
    """
    if model is None:
        raise UsageError("--model is missing: give a name of models.yaml, SOURCE:NAME or FILE.py:NAME")
    given = _job_options(options)
    path = options.get("models")
    catalogue = load_catalogue(None if path is None else Path(path))
    if isinstance(model, str):
        job = resolve_job(model, catalogue, **given)
        return job, None if split_model(model).source else catalogue[model].batch, None
    base = model if isinstance(model, Job) else Job(getattr(model, "__name__", type(model).__name__))
    return complete_job(merge_job(base, given)), None, model if callable(model) else None


def _job_options(options: Options) -> JobOptions:
    args = options.get("model_arg") or ()
    inputs = options.get("input") or ()
    target = options.get("target")
    given: JobOptions = {
        "model_args": _model_args(args),
        "inputs": [_sample(one) for one in ([inputs] if isinstance(inputs, Sample) else inputs)],
        "target": None if target is None else _sample(target),
        "freeze": _patterns(options.get("freeze")),
        "train_only": _patterns(options.get("train_only")),
    }
    for name in _PLAIN:
        given[name] = options.get(name)  # type: ignore[literal-required]
    return given


def _patterns(given: str | Sequence[str] | None) -> Sequence[str]:
    return [given] if isinstance(given, str) else given or ()


def _model_args(given: Mapping[str, object] | Sequence[str]) -> list[tuple[str, Any]]:
    if isinstance(given, Mapping):
        return [
            (key, freeze(list(value) if isinstance(value, tuple) else value)) for key, value in given.items()
        ]
    return [parse_model_arg(text) for text in given]


def _sample(given: Sample) -> TensorSpec:
    return given if isinstance(given, TensorSpec) else parse_tensor_spec(given)


def batch_of(batch: int | None, known: int | None, job: Job) -> int:
    """The batch size that is asked for, by default the job's own. Raises UsageError where there is none."""
    size = batch or known
    if size is None:
        raise UsageError(f"{job.model}: no batch size is known; give one, such as --batch 32")
    return size


def refuse_no_card(options: Options) -> None:
    """Raise UsageError where nothing bounds the memory."""
    if all(options.get(name) is None for name in ("gpu", "gpu_mib", "allocator_cap_mib")):
        raise UsageError("no GPU to fit: give --gpu NAME, --gpu-mib N or --allocator-cap-mib N")


def silent(line: str) -> None:
    """Hears the progress where nobody wants to."""
