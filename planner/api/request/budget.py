"""Compute the memory budget of a request.

The budget is the GPU's limits, corrected by stored calibrations.
"""

from collections.abc import Mapping
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from planner._support.versions import installed_version
from planner.allocator import config_of_torch, parse_alloc_conf
from planner.api.request.options import Options
from planner.errors import UsageError
from planner.hardware import (
    LARGEST_TOTAL_MIB,
    MIB,
    UNLIMITED_BYTES,
    Budget,
    Device,
    find_device,
    generic_device,
    local_device,
    make_budget,
    unlimited_device,
    with_config,
    with_nccl_of,
)
from planner.hardware.calibration import (
    Calibration,
    CalibrationQuery,
    Correction,
    check_folders,
    find_calibration,
    load_folders,
    search_path,
)
from planner.jobs import Job, check_count, kind_text, nearest

DEFAULT_CONFIDENCE = 0.99
# The types of options of the GPU, and words for them.
_TYPES: Mapping[str, tuple[type[Any] | tuple[type[Any], ...], str]] = {
    "gpu": ((str, Device), "a name, or a Device"),
    "gpu_mib": (Integral, "a whole number"),
    "alloc_conf": (str, "a string"),
    "confidence": (Real, "a number"),
}


def find_budget(options: Options) -> Budget:
    """Return the budget for the GPU that the options name, or for an unlimited GPU if they name none.

    Raises UsageError or DataFileError.
    """
    _check_options(options)
    gpu, gpu_mib, cap_mib = options.get("gpu"), options.get("gpu_mib"), options.get("allocator_cap_mib")
    if gpu is not None and gpu_mib is not None:
        raise UsageError("--gpu and --gpu-mib: both say which GPU; give one of them")
    if cap_mib is not None:
        check_count("--allocator-cap-mib", cap_mib, LARGEST_TOTAL_MIB)
    if gpu_mib is not None:
        device = generic_device(gpu_mib)
    elif gpu is None:
        device = unlimited_device()
    elif isinstance(gpu, Device):
        device = gpu
    else:
        device = local_device() if gpu.lower() == "auto" else find_device(gpu)
    confidence = options.get("confidence")
    return make_budget(
        device,
        DEFAULT_CONFIDENCE if confidence is None else confidence,
        parse_alloc_conf(options.get("alloc_conf") or ""),
        None if cap_mib is None else cap_mib * MIB,
    )


def _check_options(options: Options) -> None:
    """Raise UsageError for an unknown option, or for a GPU option of the wrong type.

    The GPU options are the keys of `_TYPES`.
    """
    fields = Options.__annotations__
    for name, value in options.items():
        if name not in fields:
            near = nearest(name, fields)
            raise UsageError(f"there is no option {name!r}" + (f"; the nearest: {near}" if near else ""))
        kinds, words = _TYPES.get(name, (object, ""))
        if value is not None and (isinstance(value, bool) or not isinstance(value, kinds)) and words:
            raise UsageError(f"--{name.replace('_', '-')}: {value!r} is {kind_text(value)}; give {words}")


def budget_for(budget: Budget, job: Job) -> Budget:
    """Return the budget adapted to a job's torch version and number of GPUs.

    The torch version sets the allocator's order of block reuse. NCCL's memory is subtracted if the job runs
    on several GPUs.
    """
    config = replace(budget.limits.config, reuse_order=config_of_torch(job.environment.torch).reuse_order)
    return with_nccl_of(with_config(budget, config), job)


def calibrate_budget(budget: Budget, job: Job, options: Options) -> Budget:
    """Return the budget corrected by the nearest stored calibration, or unchanged if there is none.

    Raises DataFileError for a broken calibration, and UsageError if folders are given without a GPU.
    """
    stored = stored_calibrations(budget, options)
    return corrected_budget(budget, find_calibration(stored, calibration_query(budget, job, options)))


def corrected_budget(budget: Budget, correction: Correction | None) -> Budget:
    """Return the budget with `correction` applied, or unchanged if `correction` is None."""
    if correction is None:
        return budget
    config = budget.limits.config
    return make_budget(
        budget.device, budget.confidence, config, budget.cap_bytes, correction, budget.likeness
    )


def stored_calibrations(budget: Budget, options: Options) -> tuple[Calibration, ...]:
    """Return the stored calibrations that the options allow, in the order in which they are searched.

    The folders of the option `calibrations` come first, then `own_calibrations`, then the package's tables.
    There are no calibrations for an unlimited GPU or with `no_calibration`. Emulated calibrations count only
    in the folders of `calibrations`. Raises the errors of `calibrate_budget`.
    """
    given, own = options.get("calibrations") or (), options.get("own_calibrations")
    if budget.device.total.value >= UNLIMITED_BYTES:
        if given:
            raise UsageError("--calibrations: calibrations are of one GPU; say which, such as --gpu L4")
        return ()
    if options.get("no_calibration"):
        return ()
    folders = [given] if isinstance(given, str | PathLike) else [*given]
    paths = list(dict.fromkeys(Path(folder) for folder in folders))
    others = [Path(own)] if own is not None and Path(own) not in paths else []
    measured = (each for each in load_folders(search_path(others)) if each.source != "emulated")
    return (*load_folders(check_folders(paths)), *measured)


def calibration_query(budget: Budget, job: Job, options: Options) -> CalibrationQuery:
    """Return the query for calibrations of a job on a GPU, with the torch version and allocator settings."""
    torch = None if options.get("trace") is not None else job.environment.torch or installed_version("torch")
    return CalibrationQuery(job, budget.device, torch, options.get("alloc_conf") or "")


def has_memory_limit(options: Options) -> bool:
    """Return whether the options name a GPU or limit the allocator."""
    return any(options.get(name) is not None for name in ("gpu", "gpu_mib", "allocator_cap_mib"))


def require_memory_limit(options: Options) -> None:
    """Raise UsageError if the options neither name a GPU nor limit the allocator."""
    if not has_memory_limit(options):
        raise UsageError("no GPU to fit: give --gpu NAME, --gpu-mib N or --allocator-cap-mib N")
