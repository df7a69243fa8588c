"""`planner verify`. What measures is imported where it runs: no other command needs it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from planner.cli.options import CALIBRATIONS, DEVICE, JOB, with_options
from planner.cli.output import Output, emit, progress
from planner.hardware import check_detected, detected_device
from planner.planning import Estimate
from planner.program import OnProgress
from planner.report import Result

if TYPE_CHECKING:
    from calibration.verify import LimitCheck, Verification


@dataclass(frozen=True, slots=True)
class VerifyResult(Result):
    """A run held against its estimate."""

    verification: "Verification"
    import_seconds: float

    @property
    def holds(self) -> bool:
        """Return whether the prediction holds at its confidence."""
        return self.verification.holds


@dataclass(frozen=True, slots=True)
class LimitResult(Result):
    """A largest batch held against runs around it."""

    check: "LimitCheck"
    import_seconds: float

    @property
    def holds(self) -> bool:
        """Return whether the prediction holds of each batch at its confidence."""
        return self.check.holds


@with_options(JOB, DEVICE, CALIBRATIONS)
def verify_command(
    options: dict[str, Any],
    output: Output,
    batch: Annotated[
        int | None,
        Option(metavar="N", help="Batch size; by default the largest that fits and the next one."),
    ],
) -> int:
    """Run a batch on this GPU and compare it with the estimate."""
    from calibration.probe.client import find_gpu
    from planner.api.request import reject_sources

    reject_sources(options, "verify")

    with progress() as on_progress:
        gpu = find_gpu()
        on_progress(f"running on {gpu.name}")
        if options["gpu_mib"] is None:
            named, detected = options["gpu"], (gpu.name, gpu.versions)
            options["gpu"] = check_detected(named, *detected) if named else detected_device(*detected)
        report: VerifyResult | LimitResult
        report = (
            _verify_limit(options, on_progress)
            if batch is None
            else _verify_batch(batch, options, on_progress)
        )
    emit(report, output)
    return 0 if report.holds else 1


def _verify_batch(batch: int, options: dict[str, Any], on_progress: OnProgress) -> VerifyResult:
    from calibration.probe.client import measure
    from calibration.verify import verify
    from planner import estimate

    result = estimate(batch=batch, **options, on_progress=on_progress)
    planned = result.estimate
    on_progress(f"running batch {planned.run.batch}")
    found = verify(planned, options["alloc_conf"] or "", measure)
    return VerifyResult(found, result.import_seconds)


def _verify_limit(options: dict[str, Any], on_progress: OnProgress) -> LimitResult:
    from calibration.probe.client import measure
    from calibration.verify import verify_limit
    from planner import estimate, max_batch

    result = max_batch(**options, on_progress=on_progress)

    def estimate_at(batch: int) -> Estimate:
        found: Estimate = estimate(batch=batch, **options, on_progress=on_progress).estimate
        return found

    check = verify_limit(result.plan, estimate_at, options["alloc_conf"] or "", on_progress, measure)
    return LimitResult(check, result.import_seconds)
