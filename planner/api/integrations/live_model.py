"""Plan existing modules for the integrations of training frameworks."""

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import fields, replace

from planner.api.integrations.settings import model_errors
from planner.api.max_batch import MaxBatchResult, max_batch
from planner.api.request.budget import has_memory_limit
from planner.api.request.options import Options
from planner.errors import ModelError, UsageError
from planner.jobs import FIELD_OPTIONS, Job
from planner.planning import Estimate

if TYPE_CHECKING:
    from planner.capture import AnyLiveOptimizer, LiveEvaluation, Prepare, StandIn, Step


_HINT = "check --input and --target"  # a hint of the tracer for jobs from a command line


class LiveLoop(Struct, frozen=True):
    """An existing module with the sample batch, step, optimizer and framework settings of its loop."""

    module: Any
    sample: Any  # a batch as the data loader gives it
    step: "Step"
    fields: Mapping[str, Any]  # fields of `planner.Job`
    unplanned: tuple[str, ...] = ()  # settings that change memory and are not planned; the answer names them
    notes: tuple[str, ...] = ()  # further notes of the answer
    stand_ins: Iterable["StandIn"] = ()
    optimizer: "AnyLiveOptimizer | None" = None  # replaces the optimizer of the job
    prepare: "Prepare | None" = None  # modifies each copy of the module
    held_bytes: int = 0  # bytes per sample of inputs that wait on the GPU besides the batch
    # The evaluation between the steps; if None, an evaluation of the job is planned as training steps.
    evaluation: "LiveEvaluation | None" = None


def plan_live_model(loop: LiveLoop, options: Options) -> MaxBatchResult:
    """Return the plan of the largest batch for the training loop of an existing module.

    The module is planned with a batch of its data. `options` are options of `planner.max_batch`, which
    override the framework's. Raises only the errors of `planner.errors`: any unexpected error becomes a
    ModelError.
    """
    try:
        with model_errors(f"{type(loop.module).__name__}: cannot be planned"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a step may warn that it logs to a missing trainer
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
    """The job of an existing module, a function that builds a copy of the module, and notes for reports."""

    job: Job
    build: Callable[[], Any]
    batch: int  # batch size of the sample
    notes: tuple[str, ...]


def read_loop(loop: LiveLoop, options: Options) -> LiveJob:
    """Convert an existing module's training loop to a `LiveJob`. Raises UsageError."""
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
    job = live_job(type(loop.module).__name__, model).replace(**{**fields_of_process(), **loop.fields})
    given = model.inputs[:-1] if loop.held_bytes else model.inputs
    shapes = f"every batch has the shapes of the sample: {', '.join(map(str, given))}"
    return LiveJob(job, model.build, model.batch, (shapes, *loop.unplanned, *loop.notes))


def named(make: Callable[[], Any], name: str) -> Callable[[], Any]:
    """Return a function named `name` that calls `make`. Reports show the name."""

    def build() -> Any:
        return make()

    build.__name__ = name
    return build


def plan_job(job: Job, make: Callable[[], Any], notes: tuple[str, ...], options: Options) -> MaxBatchResult:
    """Return the plan of a job's largest batch, with `notes` added to its report.

    `make` creates the model or the trainer of the job.
    """
    result = max_batch(named(make, job.model.name), **options_of_job(job, options))
    assert isinstance(result, MaxBatchResult)
    return with_notes(result, notes)


class BatchChoice(Struct, frozen=True):
    """A chosen batch size, the planned result from which it was chosen, and a warning."""

    result: MaxBatchResult
    batch: int
    warning: str  # one line for the user, "" if there is nothing to warn of


def choose_batch(loop: LiveLoop, options: Options, multiple: int) -> BatchChoice:
    """Choose the largest batch that trains without retries or, with a warning, the largest that fits.

    The batch is rounded down to a multiple of `multiple`. A batch below `multiple` is not rounded. An
    evaluation may take retries, one each time it starts: they cost little. Raises UsageError if no batch
    fits.
    """
    result = plan_live_model(loop, options)
    if not loop.fields.get("evaluate"):
        return choice_of(result, multiple)
    training = replace(loop, fields={**loop.fields, "evaluate": False, "eval_batch": 0})
    smaller = "give its loader a smaller batch"
    return choice_with_evaluation(result, lambda: plan_live_model(training, options), multiple, smaller)


def choice_with_evaluation(
    result: MaxBatchResult, plan_training: Callable[[], MaxBatchResult], multiple: int, smaller: str
) -> BatchChoice:
    """Choose the largest batch that trains without retries, with retries allowed in the evaluation.

    An evaluation's retries cost little. `result` is the plan with evaluation; `plan_training` makes the plan
    without evaluation. Rounding, and the choice if every batch takes retries in training, are as in
    `choice_of`. If the evaluation does not fit at any batch, the batch size is chosen without it, with a
    warning that tells how to make the evaluation `smaller`.
    """
    if 0 < result.max_batch == result.comfortable_batch:
        return choice_of(result, multiple)
    training = plan_training()
    if result.max_batch:
        return choice_of(result, multiple, min(training.comfortable_batch, result.max_batch))
    choice = choice_of(training, multiple)
    warning = f"its evaluation does not fit at any batch of the training: {smaller}"
    return replace(choice, warning=f"{warning}; {choice.warning}" if choice.warning else warning)


def choice_of(result: MaxBatchResult, multiple: int, comfortable: int | None = None) -> BatchChoice:
    """Choose a result's largest batch without retries or, with a warning, the largest that fits.

    `comfortable` replaces the result's largest batch without retries. The batch is rounded down to a multiple
    of `multiple` if it is large enough. Raises UsageError if no batch fits.
    """
    if result.max_batch == 0:
        least = result.plan.search.least
        raise UsageError(f"not even a batch of {least} fits; planner.advise lists what would change that")
    if comfortable is None:
        comfortable = result.comfortable_batch
    largest = comfortable or result.max_batch
    batch = largest - largest % multiple if largest >= multiple else largest
    slow = f"batch {batch} fits only by releasing cached memory in each step, which takes time"
    return BatchChoice(result, batch, "" if comfortable else slow)


def with_notes(result: MaxBatchResult, notes: tuple[str, ...]) -> MaxBatchResult:
    """Return the result with `notes` before the other notes in its report and its JSON."""

    estimates = {field.name: getattr(result.plan, field.name) for field in fields(result.plan)}
    changed: dict[str, Any] = {
        name: replace(one, notes=(*notes, *one.notes))
        for name, one in estimates.items()
        if isinstance(one, Estimate)
    }
    return dataclasses.replace(result, plan=replace(result.plan, **changed))


def options_of_job(job: Job, options: Options) -> Options:
    """Return a job's fields as options, overridden by `options`. The local GPU is the default limit."""
    chosen: dict[str, Any] = {
        "input": list(job.samples.inputs),
        **{name: option.write(job.value(name)) or None for name, option in FIELD_OPTIONS.items()},
    }
    given = {name: value for name, value in options.items() if value is not None}
    if not has_memory_limit(options):
        chosen["gpu"] = "auto"
    return {**chosen, **given}  # type: ignore[typeddict-item]
