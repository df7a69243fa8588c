"""Plans for modules that exist already: what the adapters to training frameworks share."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from planner.api import MaxBatchResult, max_batch
from planner.errors import UsageError
from planner.keywords import Options

if TYPE_CHECKING:
    from planner.trace.live import Step


def plan_live_model(
    module: Any,
    sample: object,
    step: "Step",
    fields: Mapping[str, Any],
    options: Options,
    left_behind: Iterable[object] = (),
) -> MaxBatchResult:
    """The largest batch for a module with a batch of its data; see `planner.trace.live.read_live_model`.

    `fields` are those of `planner.Job` that the framework decides, `options` those of `planner.max_batch`
    that the user gives, which go before. Raises the errors of `planner.errors`.
    """
    from planner.trace.live import live_job, read_live_model

    model = read_live_model(module, sample, step, left_behind)
    job = replace(live_job(type(module).__name__, model), **fields)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a step logs to a trainer which is not there
        result = max_batch(_Build(job.model, model.build), **_options_of(job, options))
    assert isinstance(result, MaxBatchResult)
    return result


class _Build:
    """A factory with a name for the reports."""

    def __init__(self, name: str, build: Callable[[], object]) -> None:
        self.__name__ = name
        self._build = build

    def __call__(self) -> object:
        return self._build()


def _options_of(job: Any, options: Options) -> Options:
    """The job's fields as options, the user's own over them."""
    chosen: dict[str, Any] = {
        "input": list(job.inputs),
        "loss": job.loss,
        "optimizer": job.optimizer,
        "optimizer_impl": job.optimizer_impl,
        "precision": job.precision,
        "grad_scaler": job.grad_scaler,
        "memory_format": job.memory_format,
        "checkpoint": job.checkpoint,
        "accumulate": job.accumulate,
        "clip_gradients": job.clip_gradients,
        "ddp": job.ddp,
    }
    given = {name: value for name, value in options.items() if value is not None}
    return {**chosen, **given}  # type: ignore[typeddict-item]


def rounded_down(batch: int, multiple: int) -> int:
    """The batch size as a multiple, at least 1 where anything fits. Raises UsageError where nothing does."""
    if batch == 0:
        raise UsageError("not even a batch of 1 fits; planner.advise says what would change that")
    return batch - batch % multiple if batch >= multiple else batch


def on_some_card(options: Options) -> Options:
    """The options with the local card, where they name none and no bound of the allocator."""
    named = any(options.get(name) is not None for name in ("gpu", "gpu_mib", "allocator_cap_mib"))
    chosen = options.copy()
    if not named:
        chosen["gpu"] = "auto"
    return chosen
