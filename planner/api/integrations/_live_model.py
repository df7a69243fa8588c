"""Plans for modules that exist already: what the adapters to training frameworks share."""

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import fields, replace

from planner.api.budget import has_memory_limit
from planner.api.integrations.settings import model_errors
from planner.api.max_batch import MaxBatchResult, max_batch
from planner.api.options import Options
from planner.errors import ModelError, UsageError
from planner.jobs import FIELD_OPTIONS, Job
from planner.planning import Estimate

if TYPE_CHECKING:
    from planner.capture import AnyLiveOptimizer, LiveEvaluation, Prepare, StandIn, Step


_HINT = "check --input and --target"  # of the tracer, whose jobs come from a command line otherwise


class LiveLoop(Struct, frozen=True):
    """A module in use with all that its framework decides of the loop around it."""

    module: Any
    sample: Any  # a batch as the data loader gives it
    step: "Step"
    fields: Mapping[str, Any]  # of `planner.Job`
    unplanned: tuple[str, ...] = ()  # settings that change memory and are not planned; the answer names them
    notes: tuple[str, ...] = ()  # further notes of the answer
    stand_ins: Iterable["StandIn"] = ()
    optimizer: "AnyLiveOptimizer | None" = None  # in place of the job's
    prepare: "Prepare | None" = None  # changes each copy of the module
    held_bytes: int = 0  # of inputs that wait on the GPU beside the batch, for each sample
    evaluation: "LiveEvaluation | None" = (
        None  # between the steps; None: as training steps, if the job evaluates
    )


def plan_live_model(loop: LiveLoop, options: Options) -> MaxBatchResult:
    """Return the largest batch for a module with a batch of its data.

    `options` are those of `planner.max_batch` that the user gives, which override those of the framework.
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
    live = read_loop(loop, options)
    return plan_job(live.job, live.build, live.notes, options)


class LiveJob(Struct, frozen=True):
    """The job of a module in use, what builds a copy of it, and the notes of its answers."""

    job: Job
    build: Callable[[], Any]
    batch: int  # of the sample
    notes: tuple[str, ...]


def read_loop(loop: LiveLoop, options: Options) -> LiveJob:
    """Return the job of a loop. Raises UsageError."""
    from planner.capture import fields_of_process, live_job, read_live_model

    chosen = any(options.get(name) is not None for name in ("optimizer", "optimizer_impl"))
    optimizer = None if chosen else loop.optimizer
    model = read_live_model(
        loop.module,
        loop.sample,
        loop.step,
        loop.stand_ins,
        optimizer,
        loop.prepare,
        loop.held_bytes,
        loop.evaluation if loop.fields.get("evaluate") else None,
    )
    job = replace(live_job(type(loop.module).__name__, model), **{**fields_of_process(), **loop.fields})
    given = model.inputs[:-1] if loop.held_bytes else model.inputs
    shapes = f"every batch has the shapes of the sample: {', '.join(map(str, given))}"
    return LiveJob(job, model.build, model.batch, (shapes, *loop.unplanned, *loop.notes))


def named(make: Callable[[], Any], name: str) -> Callable[[], Any]:
    """Return the same function under a name, which reports show."""

    def build() -> Any:
        return make()

    build.__name__ = name
    return build


def plan_job(job: Job, make: Callable[[], Any], notes: tuple[str, ...], options: Options) -> MaxBatchResult:
    """Return the largest batch of a job whose model or trainer `make` makes, with more notes."""
    result = max_batch(named(make, job.model), **options_of_job(job, options))
    assert isinstance(result, MaxBatchResult)
    return with_notes(result, notes)


class Choice(Struct, frozen=True):
    """A batch size to train with."""

    result: MaxBatchResult
    batch: int
    warning: str  # one line for the user; "" where there is nothing to warn of


def choose_batch(loop: LiveLoop, options: Options, multiple: int) -> Choice:
    """Return the largest batch that trains without retries, rounded down to a multiple unless it is smaller.

    An evaluation may take retries, one each time it starts: they cost little. Where each batch that fits
    takes retries, it is the largest that fits, with a warning. Raises UsageError where not even 1 fits.
    """
    result = plan_live_model(loop, options)
    if not loop.fields.get("evaluate"):
        return choice_of(result, multiple)
    training = replace(loop, fields={**loop.fields, "evaluate": False, "eval_batch": 0})
    smaller = "give its loader a smaller batch"
    return choice_beside_evaluation(result, lambda: plan_live_model(training, options), multiple, smaller)


def choice_beside_evaluation(
    result: MaxBatchResult, plan_training: Callable[[], MaxBatchResult], multiple: int, smaller: str
) -> Choice:
    """Return the batch of a training whose evaluation may take retries, which cost little.

    `plan_training` plans it without. An evaluation that does not fit at any batch is warned of, with a
    sentence on how to make it `smaller`, and the batch is that of the training.
    """
    if 0 < result.max_batch == result.comfortable_batch:
        return choice_of(result, multiple)
    training = plan_training()
    if result.max_batch:
        return choice_of(result, multiple, min(training.comfortable_batch, result.max_batch))
    choice = choice_of(training, multiple)
    warning = f"its evaluation does not fit at any batch of the training: {smaller}"
    return replace(choice, warning=f"{warning}; {choice.warning}" if choice.warning else warning)


def choice_of(result: MaxBatchResult, multiple: int, comfortable: int | None = None) -> Choice:
    """Return the batch size that a result makes: `comfortable`, by default the result's, where there is one.

    Raises UsageError where not even 1 fits.
    """
    if result.max_batch == 0:
        least = result.plan.search.least
        raise UsageError(f"not even a batch of {least} fits; planner.advise lists what would change that")
    if comfortable is None:
        comfortable = result.comfortable_batch
    largest = comfortable or result.max_batch
    batch = largest - largest % multiple if largest >= multiple else largest
    slow = f"batch {batch} fits only by releasing cached memory in each step, which takes time"
    return Choice(result, batch, "" if comfortable else slow)


def with_notes(result: MaxBatchResult, notes: tuple[str, ...]) -> MaxBatchResult:
    """Return the result with more assumptions, in its text and its JSON."""

    estimates = {field.name: getattr(result.plan, field.name) for field in fields(result.plan)}
    changed: dict[str, Any] = {
        name: replace(one, notes=(*notes, *one.notes))
        for name, one in estimates.items()
        if isinstance(one, Estimate)
    }
    return dataclasses.replace(result, plan=replace(result.plan, **changed))


def options_of_job(job: Job, options: Options) -> Options:
    """Return the job's fields as options, the user's over them; without a limit, for the local GPU."""
    chosen: dict[str, Any] = {
        "input": list(job.inputs),
        **{name: getattr(job, name) or None for name in FIELD_OPTIONS},
    }
    given = {name: value for name, value in options.items() if value is not None}
    if not has_memory_limit(options):
        chosen["gpu"] = "auto"
    return {**chosen, **given}  # type: ignore[typeddict-item]
