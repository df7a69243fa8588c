"""The measured and planned peaks of a guarded training run, and the stored observation."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from planner.api.guard.plan import GuardPlan, GuardRequest
from planner.errors import PlannerError
from planner.hardware.calibration import Observation
from planner.jobs import Job
from planner.planning import Estimate
from planner.report import Report, Result

if TYPE_CHECKING:
    from calibration.probe.training_meter import Readings, TrainingMeter

_TO_KEEP = "planner.guard(..., store=True) keeps such a run as an observation, from which calibrations come"


@dataclass(frozen=True, slots=True)
class GuardResult(Result):
    """The measured and planned peaks of a guarded training run.

    `str` gives the text report, `to_dict` the JSON.
    """

    estimate: Estimate | None  # None if no plan could be made
    observation: Observation
    steps: int  # optimizer steps
    stored: Path | None  # file of the observation, or None if it was not stored
    remarks: tuple[str, ...]

    def _report(self) -> Report:
        from planner.report import guard_document, guard_to_json

        return Report(
            partial(guard_document, self.estimate, self.observation, self.steps, self.remarks),
            partial(guard_to_json, self.estimate, self.observation, self.steps, self.stored, self.remarks),
        )


def result_of(
    meter: "TrainingMeter",
    request: GuardRequest,
    plan: GuardPlan | None,
    folder: Path | None,
    error: BaseException | None,
) -> GuardResult:
    """Stop the meter, store an observation if possible, and return the measured and planned peaks.

    Nothing is stored if `folder` is None.
    """
    from calibration.probe.gauge import allocator_settings
    from calibration.probe.training_meter import (
        cap_of_process,
        is_first_process,
        is_out_of_memory,
        observe_training,
        settings_of,
    )

    readings = meter.stop()
    settings = settings_of(meter, allocator_settings(), cap_of_process(meter))
    job, batch = (Job.create(type(request.model).__name__), 1) if plan is None else (plan.job, plan.batch)
    seen = observe_training(meter, readings, job, batch, settings, is_out_of_memory(error))
    remarks = _other_shapes(plan, readings)
    reason = _not_kept(plan, readings, remarks) or ("" if is_first_process() else "another process reports")
    stored = None
    if folder is not None and reason:
        remarks += (f"not kept as an observation: {reason}",)
    elif folder is not None and plan is not None:
        stored, kept = _kept(plan, seen, folder)
        remarks += kept
    elif not reason:
        remarks += (_TO_KEEP,)
    return GuardResult(None if plan is None else plan.estimate, seen, readings.steps, stored, remarks)


def _kept(plan: GuardPlan, seen: Observation, folder: Path) -> tuple[Path | None, tuple[str, ...]]:
    from calibration.trainings import keep_training

    try:
        path, about = keep_training(seen, plan.trace, plan.estimate.budget.limits.config, folder)
    except PlannerError as error:
        return None, (f"not kept as an observation: {error}",)
    send = "" if seen.source == "emulated" else f"; to contribute it: planner report {path}"
    return path, (f"kept in {path}: {about}{send}",)


def _other_shapes(plan: GuardPlan | None, readings: "Readings") -> tuple[str, ...]:
    """Return a remark if the model was called with larger inputs than the sample, else ().

    Sizes are compared by numbers of elements.
    """
    if plan is None or plan.expected is None or not readings.shapes:
        return ()
    most = max(readings.shapes, key=_elements)
    if _elements(most) <= _elements(plan.expected):
        return ()
    shapes, planned = (", ".join("x".join(map(str, one)) for one in each) for each in (most, plan.expected))
    return (f"planned for the sample ({planned}), and the model was called with more ({shapes})",)


def _elements(shapes: tuple[tuple[int, ...], ...]) -> int:
    total = 0
    for shape in shapes:
        size = 1
        for length in shape:
            size *= length
        total += size
    return total


def _not_kept(plan: GuardPlan | None, readings: "Readings", remarks: tuple[str, ...]) -> str:
    """Return why a run cannot be kept as an observation of its job, or ""."""
    if plan is None:
        return "there is no plan to hold it against"
    if readings.steps < 3:
        return f"the optimizer took {readings.steps} steps, and memory is all there from the third on"
    if remarks:
        return "batches were larger than the sample"
    if plan.is_compiled:
        return "compiled code is planned as eager code"
    if plan.other_bytes:
        return "other tensors were on the GPU"
    if not readings.was_fresh:
        return "the process had used and released more of the GPU before"
    return ""
