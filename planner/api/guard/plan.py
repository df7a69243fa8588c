"""Plan a guarded training run on its GPU.

The job is derived from the objects of the run.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from msgspec import Struct
from msgspec.structs import replace

from planner.api.integrations.live_model import LiveJob, LiveLoop, named, options_of_job, read_loop
from planner.api.integrations.settings import COMPILED, model_errors
from planner.api.request.budget import DEFAULT_CONFIDENCE, budget_for, calibrate_budget, find_budget
from planner.api.request.options import Options
from planner.api.request.request import Request, open_request
from planner.hardware import EVEN_ODDS, MIB, Budget, Device, SourcedBytes, detected_device
from planner.jobs import Job, Precision
from planner.planning import EpochPrograms, Estimate, estimate_batch, find_max_batch
from planner.planning.check import Headroom, Judgement, Verdict, judge
from planner.program import Outcome, ProgramSet, Trace
from planner.report import probability_text

if TYPE_CHECKING:
    from calibration.probe.training_meter import TrainingMeter
    from planner.capture import LiveTraining

# Smaller amounts of other processes' memory are ignored: the amount is the GPU's used memory minus this
# process's memory, whose context is estimated if NVML does not report it.
SMALLEST_OTHERS_BYTES = 256 * MIB


class GuardRequest(Struct, frozen=True):
    """The objects and options given to a guard."""

    model: Any
    optimizer: Any
    batch: Any
    loss: "str | Callable[..., Any] | None"
    step: "Callable[[Any, Any], Any] | None"
    scaler: Any
    options: Mapping[str, Any]
    own_folder: Path | None  # folder of calibrations stored by earlier guards

    @property
    def plain_optimizer(self) -> Any:
        """Return the optimizer, without accelerate's wrapper."""
        is_wrapped = type(self.optimizer).__name__ == "AcceleratedOptimizer"
        return self.optimizer.optimizer if is_wrapped else self.optimizer

    @property
    def watched(self) -> Any:
        """Return the model if its calls can be watched, or None if the model is compiled.

        Watching a compiled module would recompile it.
        """
        is_wrapped = type(self.model).__name__ == "OptimizedModule"
        return None if is_wrapped or self.model._compiled_call_impl is not None else self.model

    def open_meter(self) -> "TrainingMeter | None":
        """Return a meter of the GPU that holds the model, or None if no GPU does. Raises UsageError."""
        from planner.capture import cuda_index_of

        index = cuda_index_of(self.model)
        if index is None:
            return None
        from calibration.probe.training_meter import open_meter

        return open_meter(index)


class GuardPlan(Struct, frozen=True):
    """The planned memory of a guarded training run, and the verdict whether it fits."""

    job: Job  # includes a digest of the model's structure, which distinguishes models of one name
    estimate: Estimate
    judgement: Judgement
    trace: Trace
    largest: int | None  # largest batch at the confidence; None if not searched
    unplanned: tuple[str, ...]  # sentences on effects on memory that are not planned
    is_compiled: bool
    other_bytes: int  # other bytes of this process on the GPU, which are counted
    expected: tuple[tuple[int, ...], ...] | None  # shapes with which the model is called, if known

    @property
    def batch(self) -> int:
        """Return the number of samples in the batch that the guard was given."""
        return self.estimate.run.batch

    @property
    def is_uncertain(self) -> bool:
        """Return whether the run may run out of memory, or may need retries of the allocator."""
        chance = self.estimate.p_out_of_memory
        is_risky = chance is not None and chance > 1 - self.estimate.budget.confidence
        return is_risky or self.estimate.outcome is not Outcome.FITS

    def sentence(self) -> str:
        """Return the warning of a plan that is uncertain or does not fit, as one line of text."""
        estimate, device = self.estimate, self.estimate.budget.device
        subject = f"{self.job.model.name} at batch {self.batch:,} on {device.name}"
        size = f"it takes {estimate.process_bytes / MIB:,.0f} MiB of {device.usable.value / MIB:,.0f}"
        chance = estimate.p_out_of_memory
        risk = "" if chance is None else f", P(out of memory) {probability_text(chance)}"
        if self.judgement.verdict is Verdict.OUT_OF_MEMORY:
            text = f"{subject} most likely does not fit: {size}{risk}"
        elif estimate.outcome is Outcome.DOES_NOT_FIT:
            text = f"{subject} is not sure to fit: {size}{risk} (confidence {estimate.budget.confidence:g})"
        elif estimate.outcome is Outcome.FITS_WITH_RETRIES:
            how = "fits only by releasing" if estimate.retry_costs else "may have to release"
            text = f"{subject} {how} cached memory, which takes time: {size}{risk}"
        else:
            text = f"{subject}: {size}{risk}, more than confidence {estimate.budget.confidence:g} allows"
        if self.largest is None:
            return text
        fitting = f"the largest batch that fits is {self.largest:,}" if self.largest else "no batch fits"
        return f"{text}; {fitting}"


@model_errors("the training cannot be planned")
def plan_training(request: GuardRequest, meter: "TrainingMeter") -> GuardPlan:
    """Return the planned memory of a guarded training run, and the verdict whether it fits.

    Raises only the errors of `planner.errors`.
    """
    from planner.capture import outside_autocast, read_training

    training = read_training(request.model, request.batch, request.loss, request.step)
    device, unplanned = _device_of(meter)
    other = _other_bytes(request, training, meter)
    if other:
        size = f"{other / MIB:,.0f} MiB on the GPU"
        unplanned += (f"{size} are neither the model's nor the optimizer's; they are counted",)
    if training.is_compiled:
        unplanned += (COMPILED,)
    loop = _loop(request, training, unplanned, other)
    with outside_autocast():
        return _planned(request, training, loop, other, lambda live: _options(request, live, device, meter))


def _planned(
    request: GuardRequest,
    training: "LiveTraining",
    loop: LiveLoop,
    other: int,
    options_of: Callable[[LiveJob], Options],
) -> GuardPlan:
    from planner.capture import digest_of

    live = read_loop(loop, {})
    options = options_of(live)
    opened = open_request(named(live.build, training.name), options, live.batch)
    digest = digest_of(training, request.plain_optimizer, request.loss, request.step)
    job = opened.job.replace(model_args=(("structure", digest),))
    budget = calibrate_budget(budget_for(find_budget(options), job), job, options)
    programs = opened.programs()
    trace = EpochPrograms(opened.job, programs).trace(live.batch, budget.device.target)
    estimate = estimate_batch(opened.job, trace, budget)
    estimate = replace(estimate, notes=(*live.notes, *estimate.notes))
    even: Options = {**options, "confidence": EVEN_ODDS}
    even_budget = calibrate_budget(budget_for(find_budget(even), job), job, even)
    judgement = judge(estimate, trace, even_budget, None, Headroom())
    plan = GuardPlan(
        job, estimate, judgement, trace, None, loop.unplanned, training.is_compiled, other, training.expected
    )
    return replace(plan, largest=_largest(opened, budget, programs)) if plan.is_uncertain else plan


def _other_bytes(request: GuardRequest, training: "LiveTraining", meter: "TrainingMeter") -> int:
    """Return the bytes that this process has allocated on the GPU outside the training run.

    The model, its gradients, the optimizer state and the batch are not counted. At most `SEGMENT_BYTES` count
    as 0.
    """
    from calibration.probe.training_meter import SEGMENT_BYTES
    from planner.capture import other_bytes

    size = other_bytes(training.module, request.plain_optimizer, request.batch, meter.index)
    return size if size > SEGMENT_BYTES else 0


def _largest(opened: Request, budget: Budget, programs: ProgramSet) -> int:
    search = find_max_batch(opened.job, budget, programs, 1).search
    return search.comfortable or search.largest


def _device_of(meter: "TrainingMeter") -> tuple[Device, tuple[str, ...]]:
    """Return the GPU without the memory that other processes hold, and a note on that memory.

    Memory below `SMALLEST_OTHERS_BYTES` is neither subtracted nor noted.
    """
    from calibration.probe.training_meter import others_bytes

    device = detected_device(meter.gpu.name, meter.gpu.versions)
    others = others_bytes(meter, device.context.value)
    if others < SMALLEST_OTHERS_BYTES:
        return device, ()
    usable = device.usable
    left = SourcedBytes(
        max(0, usable.value - others), "what other processes leave", usable.spread, usable.kind
    )
    note = f"other processes hold {others / MIB:,.0f} MiB of the GPU now; planned for what they leave"
    return replace(device, usable=left), (note,)


def _loop(
    request: GuardRequest,
    training: "LiveTraining",
    unplanned: tuple[str, ...],
    other: int,
) -> LiveLoop:
    from planner.capture import fields_of_optimizer, hold_other_bytes, notes_of_optimizer, read_optimizer

    optimizer = request.plain_optimizer
    fields = {**training.fields, **fields_of_optimizer(optimizer)}
    if request.scaler is not None and request.scaler.is_enabled():
        fields |= {"grad_scaler": True, "precision": fields.get("precision", Precision.AMP_FP16)}
    live = read_optimizer(optimizer, training.module)
    prepare = partial(hold_other_bytes, size_bytes=other) if other else None
    notes = (*training.notes, *notes_of_optimizer(live))
    return LiveLoop(
        training.module, request.batch, training.step, fields, unplanned, notes, (), live, prepare
    )


def _options(request: GuardRequest, live: LiveJob, device: Device, meter: "TrainingMeter") -> Options:
    """Return the settings of a run's objects and process as options, overridden by the user's options."""
    from calibration.probe.gauge import allocator_settings
    from calibration.probe.training_meter import cap_of_process

    cap = cap_of_process(meter)
    own = request.own_folder
    process: dict[str, Any] = {
        "gpu": device,
        "alloc_conf": allocator_settings() or None,
        "allocator_cap_mib": None if cap is None else cap // MIB,
        "confidence": DEFAULT_CONFIDENCE,
        "own_calibrations": own if own is not None and own.is_dir() else None,
    }
    given = {name: value for name, value in request.options.items() if value is not None}
    return options_of_job(live.job, cast(Options, {**process, **given}))
