"""Plans for modules that exist already: what the adapters to training frameworks share."""

import dataclasses
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import fields, replace

from planner.api.budget import has_memory_limit
from planner.api.integrations.settings import model_errors
from planner.api.max_batch import MaxBatchResult, max_batch
from planner.api.options import Options
from planner.errors import ModelError
from planner.jobs import FIELD_OPTIONS
from planner.planning import Estimate

if TYPE_CHECKING:
    from planner.capture.models import LiveOptimizer, Prepare, StandIn, Step


_HINT = "check --input and --target"  # of the tracer, whose jobs come from a command line otherwise


class LiveLoop(Struct, frozen=True):
    """A module in use with all that its framework decides of the loop around it."""

    module: Any
    sample: Any  # a batch as the data loader gives it
    step: "Step"
    fields: Mapping[str, Any]  # of `planner.Job`
    unplanned: tuple[str, ...] = ()  # settings that change memory and are not planned; the answer names them
    notes: tuple[str, ...] = ()  # what else the answer says
    stand_ins: Iterable["StandIn"] = ()
    optimizer: "LiveOptimizer | None" = None  # in place of the job's
    prepare: "Prepare | None" = None  # changes each copy of the module
    held_bytes: int = 0  # of inputs that wait on the GPU beside the batch, for each sample


def plan_live_model(loop: LiveLoop, options: Options) -> MaxBatchResult:
    """Return the largest batch for a module with a batch of its data.

    `options` are those of `planner.max_batch` that the user gives, which go before what the framework says.
    Raises the errors of `planner.errors` and no other: what goes wrong unexpectedly is a ModelError.
    """
    try:
        with model_errors(f"{type(loop.module).__name__}: cannot be planned"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a step logs to a trainer which is not there
            return _planned(loop, options)
    except ModelError as error:
        message = str(error)
        if _HINT not in message:
            raise
        raise ModelError(message.replace(_HINT, "check that the step runs on the sample batch")) from error


def _planned(loop: LiveLoop, options: Options) -> MaxBatchResult:
    from planner.capture.models import fields_of_process, live_job, read_live_model

    chosen = any(options.get(name) is not None for name in ("optimizer", "optimizer_impl"))
    optimizer = None if chosen else loop.optimizer
    model = read_live_model(
        loop.module, loop.sample, loop.step, loop.stand_ins, optimizer, loop.prepare, loop.held_bytes
    )
    job = replace(live_job(type(loop.module).__name__, model), **{**fields_of_process(), **loop.fields})

    def build() -> Any:
        return model.build()

    build.__name__ = job.model  # for the reports
    result = max_batch(build, **_options_of(job, options))
    assert isinstance(result, MaxBatchResult)
    given = model.inputs[:-1] if loop.held_bytes else model.inputs
    shapes = f"every batch has the shapes of the sample: {', '.join(map(str, given))}"
    return with_notes(result, (shapes, *loop.unplanned, *loop.notes))


def largest_at_ease(loop: LiveLoop, options: Options) -> tuple[MaxBatchResult, int]:
    """Return the plan, and the largest batch that trains without retries, which evaluations may take."""
    result = plan_live_model(loop, options)
    if not loop.fields.get("evaluate") or result.comfortable_batch == result.max_batch:
        return result, result.comfortable_batch
    training = replace(loop, fields={**loop.fields, "evaluate": False, "eval_batch": 0})
    return result, min(plan_live_model(training, options).comfortable_batch, result.max_batch)


def with_notes(result: MaxBatchResult, notes: tuple[str, ...]) -> MaxBatchResult:
    """Return the result with more assumptions, in its text and its JSON."""

    estimates = {field.name: getattr(result.plan, field.name) for field in fields(result.plan)}
    changed: dict[str, Any] = {
        name: replace(one, notes=(*notes, *one.notes))
        for name, one in estimates.items()
        if isinstance(one, Estimate)
    }
    return dataclasses.replace(result, plan=replace(result.plan, **changed))


def _options_of(job: Any, options: Options) -> Options:
    """Return the job's fields as options, the user's over them; without a limit, for the local GPU."""
    chosen: dict[str, Any] = {
        "input": list(job.inputs),
        **{name: getattr(job, name) or None for name in FIELD_OPTIONS},
    }
    given = {name: value for name, value in options.items() if value is not None}
    if not has_memory_limit(options):
        chosen["gpu"] = "auto"
    return {**chosen, **given}  # type: ignore[typeddict-item]
