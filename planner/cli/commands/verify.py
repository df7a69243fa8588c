"""The command `planner verify`.

Measuring code is imported only when the command runs, since no other command needs it.
"""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from planner.cli.options import CALIBRATIONS, DEVICE, JOB, Answer, option, with_options
from planner.hardware import check_detected, detected_device
from planner.planning import Estimate
from planner.program import OnProgress
from planner.report import Report, Result

if TYPE_CHECKING:
    from calibration.verify import LimitCheck, Verification


@dataclass(frozen=True, slots=True)
class VerifyResult(Result):
    """The result of `planner verify` with a batch: a run and its estimate."""

    verification: "Verification"
    import_seconds: float

    def _report(self) -> Report:
        from planner.report import verification_document, verification_to_json

        return Report(
            partial(verification_document, self.verification),
            partial(verification_to_json, self.verification, self.import_seconds),
        )


@dataclass(frozen=True, slots=True)
class LimitResult(Result):
    """The predicted largest batch and the runs around it, for `planner verify` without a batch."""

    check: "LimitCheck"
    import_seconds: float

    def _report(self) -> Report:
        from planner.report import limit_document, limit_to_json

        return Report(
            partial(limit_document, self.check),
            partial(limit_to_json, self.check, self.import_seconds),
        )


@with_options(JOB, DEVICE, CALIBRATIONS)
def verify_command(
    options: dict[str, Any],
    on_progress: OnProgress,
    batch: Annotated[
        int | None, option("N", "Batch size; by default the largest that fits and the next one.")
    ],
) -> Answer:
    """Run a batch on this GPU and compare it with the estimate."""
    from calibration.probe.client import find_gpu
    from planner.api.request.request import reject_sources

    reject_sources(options, "verify")
    gpu = find_gpu()
    on_progress(f"running on {gpu.name}")
    if options["gpu_mib"] is None:
        named, detected = options["gpu"], (gpu.name, gpu.versions)
        options["gpu"] = check_detected(named, *detected) if named else detected_device(*detected)
    options["on_progress"] = on_progress
    return _verify_limit(options) if batch is None else _verify_batch(batch, options)


def _verify_batch(batch: int, options: dict[str, Any]) -> Answer:
    from calibration.probe.client import measure
    from calibration.verify import verify
    from planner import estimate

    result = estimate(batch=batch, **options)
    planned = result.estimate
    options["on_progress"](f"running batch {planned.run.batch}")
    verification = verify(planned, options["alloc_conf"] or "", measure)
    return VerifyResult(verification, result.import_seconds), verification.holds


def _verify_limit(options: dict[str, Any]) -> Answer:
    from calibration.probe.client import measure
    from calibration.verify import verify_limit
    from planner import estimate, max_batch

    result = max_batch(**options)

    def estimate_at(batch: int) -> Estimate:
        estimated: Estimate = estimate(batch=batch, **options).estimate
        return estimated

    alloc_conf, on_progress = options["alloc_conf"] or "", options["on_progress"]
    check = verify_limit(result.plan, estimate_at, alloc_conf, on_progress, measure)
    return LimitResult(check, result.import_seconds), check.holds
