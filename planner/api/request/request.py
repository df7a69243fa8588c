"""Convert a caller's options to a request.

A request is a job, its memory limits and the source of its traces.
"""

import inspect
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from msgspec import Struct

from planner.api.request.budget import budget_for, calibrate_budget, find_budget
from planner.api.request.options import Options, Sample
from planner.emulator import open_convolutions
from planner.errors import DataFileError, UsageError, unsaved
from planner.hardware import Budget
from planner.jobs import (
    FIELD_OPTIONS,
    JOB_OPTIONS,
    CodeKind,
    Job,
    TensorSpec,
    allowed_sources,
    check_count,
    complete_job,
    defaults_of_code,
    is_cudnn_of_files,
    is_torchtitan,
    kind_of_code,
    kind_text,
    load_catalogue,
    merge_job,
    parse_arguments,
    parse_tensor_spec,
    read_torchtitan,
    require_one_size,
    resolve_job,
    split_model,
)
from planner.planning import CaptureMode, Factory, check_batch, complete_from_library, open_programs
from planner.program import LARGEST_BATCH, ProgramSet, TraceSource, ignore_progress
from planner.store import BundledStore, ProgramStore, SavedJob, UserCache, open_cache, open_saved, save_job

Model = str | Job | Factory

_NOT_IN_TRACES = tuple(option.name for option in JOB_OPTIONS if not option.changes_trace)
_OF_JOB = (*(option.name for option in JOB_OPTIONS if option.changes_trace), "models", "isolate")


DEFAULT_LIMIT_SECONDS = 600.0
LONGEST_LIMIT_SECONDS = 10**6


class Request(Struct, frozen=True):
    """A job with its memory limits and the source of its traces."""

    job: Job
    budget: Budget  # corrected by the stored calibrations
    options: Options
    chosen_batch: int | None
    factory: Factory | None
    stores: Sequence[ProgramStore]  # stores that may have the job's programs
    saved: SavedJob | None  # content of a trace file that replaces the model, or None if no file is given
    start: float  # `perf_counter` before the job was made, which may import the model's library

    @property
    def on_progress(self) -> Callable[[str], None]:
        """Return the callback for progress messages, by default a function that does nothing."""
        return self.options.get("on_progress") or ignore_progress

    @property
    def batch(self) -> int:
        """Return the given batch size, or else the job's default.

        Raises UsageError if neither is known, or if the batch size exceeds the dataset size.
        """
        if self.chosen_batch is None:
            raise UsageError(f"{self.job.model.name}: no batch size is known; give one, such as --batch 32")
        check_batch(self.job, self.chosen_batch)
        return self.chosen_batch

    def programs(self, mode: CaptureMode = CaptureMode.SHARED, job: Job | None = None) -> ProgramSet:
        """Return the programs of `job`, or of the request's job if `job` is None.

        Raises UsageError. With a trace file, the programs are always the content of the file.
        """
        if self.saved is not None:
            return self.saved
        stores = self.stores if job is None and mode is CaptureMode.SHARED else ()
        limit_seconds = isolation_limit(self.options)
        return open_programs(
            job or self.job, self.on_progress, self.factory, stores, mode, limit_seconds,
            answers_folder(self.options),
        )  # fmt: skip

    def traces(self, mode: CaptureMode = CaptureMode.SHARED, job: Job | None = None) -> TraceSource:
        """Return a function that makes the trace of a batch size on the request's GPU.

        Raises UsageError. The parameters are as for `programs`.
        """
        programs, target = self.programs(mode, job), self.budget.device.target
        return lambda batch: programs.trace(batch, target)

    def save_trace(self, result: object, batch: int, programs: ProgramSet | None = None) -> None:
        """Write the job and its programs to the file that the option `save_trace` names, if it is given.

        Raises UnsavedError, which holds `result`, if that fails.
        """
        path = self.options.get("save_trace")
        if path is not None:
            with unsaved(result):
                programs = programs or self.programs()
                self.on_progress("capturing programs for all GPUs, to be saved")
                save_job(self.job, batch, self.budget.device.target, programs, Path(path))


def open_request(
    model: Model | None,
    options: Options,
    batch: int | None = None,
    *,
    command: str = "",
    check_job: Callable[[Job], None] = require_one_size,
) -> Request:
    """Convert a caller's model and options to a request: the job, its budget and the source of its traces.

    `command` is the name of a command that runs the model itself: it takes neither a trace file nor a
    separate process for the model. `check_job` raises UsageError for unsupported jobs.
    Raises UsageError, DataFileError, or ModelError if an import fails.
    """
    if batch is not None:
        batch = check_count("--batch", batch, LARGEST_BATCH)
    isolation_limit(options)
    if command:
        reject_sources(options, command)
    budget = find_budget(options)
    start = perf_counter()
    path = options.get("trace")
    saved: SavedJob | None = None
    default_batch: int | None
    if path is not None:
        saved, job = _load_trace(model, options, Path(path))
        default_batch, factory = saved.batch, None
        stores: tuple[ProgramStore, ...] = ()
    else:
        opened = open_stores(options)
        job, default_batch, factory = make_job(model, options, opened)
        check_job(job)
        stores = () if factory is not None else opened  # its model has no name under which to store it
    budget = calibrate_budget(budget_for(budget, job), job, options)
    return Request(job, budget, options, batch or default_batch, factory, stores, saved, start)


def reject_sources(options: Mapping[str, object], command: str) -> None:
    """Raise UsageError if the options name a trace file or isolate the model.

    `command` runs the model itself.
    """
    for name in ("trace", "save_trace"):
        if options.get(name) is not None:
            raise UsageError(f"--{name.replace('_', '-')}: {command} runs the model itself; remove it")
    if isolation_limit(options) is not None:
        raise UsageError(f"--isolate: {command} runs the model in its own process; remove it")


def isolation_limit(options: Mapping[str, object]) -> float | None:
    """Return the time limit of an isolated trace in seconds, or None without isolation. Raises UsageError."""
    limit_seconds = options.get("time_limit")
    if not options.get("isolate"):
        if limit_seconds is not None:
            raise UsageError("--time-limit: only a model in a process of its own is stopped; add --isolate")
        return None
    if limit_seconds is None:
        return DEFAULT_LIMIT_SECONDS
    if not isinstance(limit_seconds, int | float) or not 0 < limit_seconds <= LONGEST_LIMIT_SECONDS:
        raise UsageError(f"--time-limit {limit_seconds}: give the seconds that one trace may take")
    return float(limit_seconds)


def open_stores(options: Options) -> tuple[ProgramStore, ...]:
    """Return the program stores that the options allow: the user's cache and the bundled store, or ().

    The bundled store is left out if torch's settings are changed. Returns () without `cache` or if the model
    is isolated. Raises UsageError.
    """
    folder = options.get("cache")
    if folder is None or options.get("isolate"):
        return ()
    settings = _changed_settings()
    cache = UserCache(open_cache(Path(folder), options.get("warn") or _warn), settings)
    return (cache,) if settings else (cache, BundledStore())


def answers_folder(options: Options) -> Path | None:
    """Return the cache folder for results of cuDNN queries, or None if there is no cache."""
    folder = options.get("cache")
    return None if folder is None else Path(folder)


def _changed_settings() -> Mapping[str, str]:
    """Return changed torch settings that affect traces, by name; none if torch is not imported."""
    if sys.modules.get("torch") is None:
        return {}
    from planner.capture import changed_settings

    return changed_settings()


def _warn(line: str) -> None:
    warnings.warn(line, stacklevel=2)


def _load_trace(model: Model | None, options: Options, path: Path) -> tuple[SavedJob, Job]:
    """Load a trace file, and return it with its job, merged with the options that do not affect traces.

    Raises UsageError for options that contradict the file, and DataFileError for a job that may not be loaded
    from a file.
    """
    given = [name for name in (*_OF_JOB, "save_trace") if options.get(name) not in (None, (), [], {}, False)]
    if model is not None or given:
        flag = "--" + ("model" if model is not None else given[0]).replace("_", "-")
        raise UsageError(f"{flag} and --trace: the trace file decides that; remove one")
    saved = open_saved(path)
    where = saved.job.environment.cudnn
    if saved.has_queries and not (options.get("cudnn") or is_cudnn_of_files(where)):
        raise DataFileError(
            f"{path}: its job names the cuDNN in {where!r}, which a file may not load; give --cudnn with a "
            "folder that you trust, or --cudnn installed, stored or published"
        )
    if saved.job.samples.sizes:
        raise DataFileError(
            f"{path}: its job reads the sizes of {saved.job.samples.sizes!r}, which a file may not name"
        )
    others = {name: options.get(name) for name in _NOT_IN_TRACES}
    for name in ("cudnn", "cudnn_benchmark"):
        if options.get(name) and not saved.has_queries:
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag}: {path} holds the workspaces of its convolutions; remove {flag}")
    job = complete_job(merge_job(saved.job, others))
    if saved.has_queries:
        saved.convolutions = open_convolutions(job, answers_folder(options))
    return saved, job


def make_job(
    model: Model | None, options: Options, stores: Sequence[ProgramStore] = ()
) -> tuple[Job, int | None, Factory | None]:
    """Return a model's job, its default batch size or None, and the model's factory or None.

    The batch size is None unless `model` is a name in the catalogue. The factory is None unless `model` is
    callable. Raises UsageError or DataFileError.
    """
    if model is None:
        raise UsageError("--model is missing: give a name of models.yaml, SOURCE:NAME or FILE.py:NAME")
    given = _job_options(options)
    path = options.get("models")
    catalogue = load_catalogue(None if path is None else Path(path), allowed_sources(options))
    if isinstance(model, str):
        if is_torchtitan(model):
            catalogue = {**catalogue, model: read_torchtitan(model, given)}
        job = complete_from_library(resolve_job(model, catalogue, **given), stores)
        return job, None if split_model(model).source else catalogue[model].batch, None
    torch, factory = sys.modules.get("torch"), None
    if isinstance(model, Job):
        base = model
    elif torch is not None and isinstance(model, torch.nn.Module):  # it is restored after each capture
        base, factory = _job_of_factory(type(model), given), lambda: model
    elif callable(model):
        base, factory = _job_of_factory(model, given), model
    else:
        raise UsageError(f"{kind_text(model)} is no model; give a name, a job, or what makes the module")
    job = complete_from_library(complete_job(merge_job(base, given)), stores)
    if factory is None:
        return job, None, None
    from planner.capture import LiveConstructor

    return job, None, LiveConstructor(factory)


def _job_of_factory(factory: Factory, given: Mapping[str, Any]) -> Job:
    """Return the job of a class or function that creates a model.

    Defaults come from its source. Raises UsageError for a function that is a training step, since the models
    of the step exist already.
    """
    name = getattr(factory, "__name__", type(factory).__name__)
    arguments = [key for key, _ in given["model_args"]]
    try:
        file = inspect.getsourcefile(factory) if getattr(factory, "__qualname__", "") == name else None
    except (TypeError, OSError):  # a builtin, or a class without a file, as in a notebook
        file = None
    if file is None or given["mode"] is not None:
        return Job.create(name)
    if inspect.isfunction(factory) and kind_of_code(f"{file}:{name}", arguments) is CodeKind.STEP_FUNCTION:
        raise UsageError(
            f"{name}: needs arguments; give them with model_arg, or name a training step as "
            f"{Path(file).name}:{name}, whose models are built again for a plan"
        )
    return Job.create(name, **defaults_of_code(f"{file}:{name}", arguments))


def _job_options(options: Options) -> dict[str, Any]:
    """Convert a job's options to fields of `Job`. Only arguments and samples are parsed here."""
    inputs, targets = _samples(options.get("input")), _samples(options.get("target"))
    is_one = len(targets) == 1 and targets[0].keyword is None
    return {
        **{name: options.get(name) for name in FIELD_OPTIONS},
        "model_args": parse_arguments(options.get("model_arg") or (), "--model-arg"),
        "optimizer_args": parse_arguments(options.get("optimizer_arg") or (), "--optimizer-arg"),
        "inputs": inputs,
        **({"target": targets[0]} if is_one else {"targets": targets}),
    }


def _samples(given: Sample | Sequence[Sample] | None) -> list[TensorSpec]:
    several = given if isinstance(given, list | tuple) else () if given is None else (given,)
    for one in several:
        if not isinstance(one, str | TensorSpec):
            raise UsageError(f"{_about(one)}: write one sample as a text, such as '3x224x224' or '128:int64'")
    return [one if isinstance(one, TensorSpec) else parse_tensor_spec(one) for one in several]


def _about(sample: object) -> str:
    """Return text that names a sample of a wrong type, by the shape if it is a tensor or array."""
    shape = getattr(sample, "shape", None)
    return f"tensor {sample!r}" if shape is None else f"{kind_text(sample)} of shape {tuple(shape)}"


def checked_multiple(multiple_of: int | None) -> int:
    """Return `multiple_of`, or 1 if it is None. Raises UsageError if the number is not a valid count."""
    return 1 if multiple_of is None else check_count("--multiple-of", multiple_of, LARGEST_BATCH)
