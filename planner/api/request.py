"""The keywords of `planner.api`, which are the options of the command line, as a job and a budget."""

import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from planner._support.versions import installed_version
from planner.allocator import parse_alloc_conf
from planner.api.options import Options, Sample
from planner.capture.subprocess import opener_of
from planner.errors import UsageError
from planner.hardware import (
    ENDLESS_BYTES,
    LARGEST_TOTAL_MIB,
    MIB,
    Budget,
    Device,
    find_device,
    generic_device,
    make_budget,
    unlimited_device,
)
from planner.hardware.calibration import (
    Calibration,
    CalibrationQuery,
    check_folders,
    find_calibration,
    load_folders,
    search_path,
)
from planner.jobs import (
    FIELD_OPTIONS,
    JOB_OPTIONS,
    Job,
    TensorSpec,
    allowed_sources,
    check_count,
    complete_job,
    freeze,
    load_catalogue,
    merge_job,
    nearest,
    parse_model_arg,
    parse_tensor_spec,
    resolve_job,
    split_model,
)
from planner.planning import (
    LARGEST_BATCH,
    Factory,
    Workload,
    complete_from_library,
    kept_workload,
    load_workload,
    take_trace,
)
from planner.store import Shelves, ShippedShelf, UserShelf, open_cache

Model = str | Job | Factory

DEFAULT_CONFIDENCE = 0.99
_NOT_IN_TRACES = tuple(option.name for option in JOB_OPTIONS if not option.changes_trace)
_OF_JOB = (*(option.name for option in JOB_OPTIONS if option.changes_trace), "models", "isolate")


def budget_of(options: Options) -> Budget:
    """What the card leaves to the allocator; without a card, no end. Raises UsageError or DataFileError, also
    for options that there are not, which would mean nothing.
    """
    _refuse_unknown(options)
    gpu, gpu_mib, cap_mib = options.get("gpu"), options.get("gpu_mib"), options.get("allocator_cap_mib")
    if gpu is not None and gpu_mib is not None:
        raise UsageError("--gpu and --gpu-mib: both say which GPU; give one of them")
    if cap_mib is not None:
        check_count("--allocator-cap-mib", cap_mib, LARGEST_TOTAL_MIB)
    if gpu_mib is not None:
        device = generic_device(gpu_mib)
    elif gpu is not None:
        device = gpu if isinstance(gpu, Device) else _named_device(gpu)
    else:
        device = unlimited_device()
    confidence = options.get("confidence")
    return make_budget(
        device,
        DEFAULT_CONFIDENCE if confidence is None else confidence,
        parse_alloc_conf(options.get("alloc_conf") or ""),
        None if cap_mib is None else cap_mib * MIB,
    )


def _refuse_unknown(options: Options) -> None:
    known = Options.__annotations__
    for name in options:
        if name not in known:
            near = nearest(name, known)
            raise UsageError(f"there is no option {name!r}" + (f"; the nearest: {near}" if near else ""))


def _named_device(name: str) -> Device:
    if name.lower() == "auto":
        from planner.hardware import local_device

        return local_device()
    return find_device(name)


def calibrate_budget(budget: Budget, job: Job, options: Options) -> Budget:
    """The budget as the nearest stored calibration corrects it.

    Raises DataFileError for a broken calibration, UsageError for folders that are given without a card.
    """
    found = find_calibration(stored_calibrations(budget, options), wanted_of(budget, job, options))
    if found is None:
        return budget
    return make_budget(
        budget.device, budget.confidence, budget.arena.rules, budget.cap_bytes, found, budget.likeness
    )


def stored_calibrations(budget: Budget, options: Options) -> tuple[Calibration, ...]:
    """All that may answer, folder by folder; none on a card without end. Raises as `calibrate_budget`.

    Emulated ones answer from folders that are given alone, not from the user's own.
    """
    given, own = options.get("calibrations") or (), options.get("own_calibrations")
    if budget.device.total.value >= ENDLESS_BYTES:
        if given:
            raise UsageError("--calibrations: calibrations are those of a card; say which, such as --gpu L4")
        return ()
    if options.get("no_calibration"):
        return ()
    folders = [given] if isinstance(given, str | PathLike) else [*given]
    paths = list(dict.fromkeys(Path(folder) for folder in folders))
    others = [Path(own)] if own is not None and Path(own) not in paths else []
    measured = (known for known in load_folders(search_path(others)) if known.source != "emulated")
    return (*load_folders(check_folders(paths)), *measured)


def wanted_of(budget: Budget, job: Job, options: Options) -> CalibrationQuery:
    """What is asked of the stored calibrations."""
    torch = None if options.get("trace") is not None else installed_version("torch")
    return CalibrationQuery(job, budget.device, torch, options.get("alloc_conf") or "")


def workload_of(model: Model | None, options: Options, budget: Budget) -> Workload:
    """The job and where its traces come from. Raises UsageError or DataFileError."""
    chip = budget.device.target
    path = options.get("trace")
    if path is not None:
        _refuse_beside_trace(model, options)
        loaded = load_workload(Path(path), chip)
        return replace(
            loaded,
            job=complete_job(merge_job(loaded.job, {name: options.get(name) for name in _NOT_IN_TRACES})),
        )
    open_workload = opener_of(options)
    shelves = shelves_of(options)
    job, batch, factory = job_of(model, options, shelves)
    shelves = shelves_for(job, factory, shelves)
    if shelves is not None:
        return kept_workload(job, batch, chip, shelves)
    return open_workload(job, batch, factory, chip, take_trace)


def shelves_of(options: Options) -> Shelves | None:
    """Where kept traces are looked for: nowhere without `cache`, for a model in a process of its own, or
    where torch is set otherwise than by default.

    Raises UsageError.
    """
    folder = options.get("cache")
    if folder is None or options.get("isolate") or _is_torch_changed():
        return None
    cache = open_cache(Path(folder), options.get("warn") or _warn)
    return Shelves(UserShelf(cache), ShippedShelf())


def shelves_for(job: Job, factory: Factory | None, shelves: Shelves | None) -> Shelves | None:
    """Those that keep this job's traces: none for a factory's model, which has no name, nor where a library
    is asked, which the kept traces do not know.
    """
    return None if factory is not None or job.cudnn else shelves


def _is_torch_changed() -> bool:
    """Whether this process has set what traces depend on and no key says."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    return torch.are_deterministic_algorithms_enabled() or torch.get_default_dtype() is not torch.float32


def _warn(line: str) -> None:
    warnings.warn(line, stacklevel=2)


def _refuse_beside_trace(model: Model | None, options: Options) -> None:
    given = [name for name in (*_OF_JOB, "save_trace") if options.get(name) not in (None, (), [], {}, False)]
    if model is not None or given:
        option = "model" if model is not None else given[0]
        raise UsageError(
            f"--{option.replace('_', '-')} and --trace: the trace file says that; leave one away"
        )


def job_of(
    model: Model | None, options: Options, shelves: Shelves | None = None
) -> tuple[Job, int | None, Factory | None]:
    """The whole job, the batch size of its origin where it has one, and the factory where one is given.

    Raises UsageError or DataFileError.
    """
    if model is None:
        raise UsageError("--model is missing: give a name of models.yaml, SOURCE:NAME or FILE.py:NAME")
    given = _job_options(options)
    path = options.get("models")
    catalogue = load_catalogue(None if path is None else Path(path), allowed_sources(options))
    if isinstance(model, str):
        job = complete_from_library(resolve_job(model, catalogue, **given), shelves)
        return job, None if split_model(model).source else catalogue[model].batch, None
    _refuse_built(model)
    base = model if isinstance(model, Job) else Job(getattr(model, "__name__", type(model).__name__))
    job = complete_from_library(complete_job(merge_job(base, given)), shelves)
    return job, None, model if callable(model) else None


def _refuse_built(model: object) -> None:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        raise UsageError(
            f"{type(model).__name__}: this module is built already; give the class, or a function that "
            "builds it, such as lambda: Net(10)"
        )


def _job_options(options: Options) -> dict[str, Any]:
    """Return the options of the job by the names of `Job`'s fields."""
    inputs, targets = _samples(options.get("input")), _samples(options.get("target"))
    is_one = len(targets) == 1 and targets[0].keyword is None
    return {
        **{name: options.get(name) for name in FIELD_OPTIONS},
        "model_args": _model_args(options.get("model_arg") or ()),
        "inputs": inputs,
        **({"target": targets[0]} if is_one else {"targets": targets}),
    }


def _model_args(given: Mapping[str, object] | str | Sequence[str]) -> list[tuple[str, Any]]:
    if isinstance(given, Mapping):
        return [
            (key, freeze(list(value) if isinstance(value, tuple) else value)) for key, value in given.items()
        ]
    return [parse_model_arg(text) for text in ([given] if isinstance(given, str) else given)]


def _samples(given: Sample | Sequence[Sample] | None) -> list[TensorSpec]:
    several = given if isinstance(given, list | tuple) else () if given is None else (given,)
    return [_sample(one) for one in several]


def _sample(given: Sample) -> TensorSpec:
    if not isinstance(given, str | TensorSpec):
        raise UsageError(f"tensor {given!r}: write one sample as a text, such as '3x224x224' or '128:int64'")
    return given if isinstance(given, TensorSpec) else parse_tensor_spec(given)


def batch_of(batch: int | None, known: int | None, job: Job) -> int:
    """The batch size that is asked for, by default the job's own. Raises UsageError where there is none."""
    size = batch or known
    if size is None:
        raise UsageError(f"{job.model}: no batch size is known; give one, such as --batch 32")
    return size


def checked_multiple(multiple_of: int | None) -> int:
    """Return the number of which an answer has to be a multiple, 1 unless given. Raises UsageError."""
    return 1 if multiple_of is None else check_count("--multiple-of", multiple_of, LARGEST_BATCH)


def refuse_no_card(options: Options) -> None:
    """Raise UsageError where nothing bounds the memory."""
    if all(options.get(name) is None for name in ("gpu", "gpu_mib", "allocator_cap_mib")):
        raise UsageError("no GPU to fit: give --gpu NAME, --gpu-mib N or --allocator-cap-mib N")


def ignore_progress(line: str) -> None:
    """Hears the progress where nobody wants to."""
