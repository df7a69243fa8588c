"""`planner verify`. What measures is imported where it runs: no other command needs it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from planner.cli.commands.calibrate import refuse_trace
from planner.cli.options import (
    CalibrationOptions,
    CardOptions,
    JobOptions,
    OutputOptions,
    Text,
    takes,
    whole,
)
from planner.cli.output import answer, working
from planner.cli.words import Option
from planner.hardware import check_detected, detected_device
from planner.planning import Estimate, OnProgress
from planner.report import Result

if TYPE_CHECKING:
    from calibration.verify import LimitCheck, Verification


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What is run."""

    batch: Annotated[
        Text, Option(metavar="N", help="Batch size; by default the largest that fits and the next one.")
    ] = None


@dataclass(frozen=True, slots=True)
class VerifyResult(Result):
    """A run held against its estimate."""

    verification: "Verification"
    import_seconds: float

    @property
    def holds(self) -> bool:
        """Whether the prediction holds at its confidence."""
        return self.verification.holds


@dataclass(frozen=True, slots=True)
class LimitResult(Result):
    """A largest batch held against runs around it."""

    check: "LimitCheck"
    import_seconds: float

    @property
    def holds(self) -> bool:
        """Whether the prediction holds of each batch at its confidence."""
        return self.check.holds


@takes(RunOptions, JobOptions, CardOptions, CalibrationOptions, OutputOptions)
def verify_command(
    size: RunOptions,
    job: JobOptions,
    card: CardOptions,
    stored: CalibrationOptions,
    output: OutputOptions,
) -> int:
    """Run a batch on this GPU and compare it with the estimate."""
    batch = whole("--batch", size.batch, "32")
    options = job.keywords() | card.keywords() | stored.keywords()
    refuse_trace(options, "verify")
    from calibration.probe.client import find_gpu

    with working() as tell:
        gpu = find_gpu()
        tell(f"running on {gpu.name}")
        if options["gpu_mib"] is None:
            named = options["gpu"]
            found = (gpu.name, gpu.versions)
            options["gpu"] = check_detected(named, *found) if named else detected_device(*found)
        report: VerifyResult | LimitResult
        report = _verify_limit(options, tell) if batch is None else _verify_batch(batch, options, tell)
    answer(report, output)
    return 0 if report.holds else 1


def _verify_batch(batch: int, options: dict[str, Any], tell: OnProgress) -> VerifyResult:
    from calibration.probe.client import measure
    from calibration.verify import verify
    from planner import estimate

    result = estimate(batch=batch, **options, tell=tell)
    planned = result.estimate
    tell(f"running batch {planned.run.batch}")
    found = verify(planned.job, planned.run.batch, planned, options["alloc_conf"] or "", measure)
    return VerifyResult(found, result.import_seconds)


def _verify_limit(options: dict[str, Any], tell: OnProgress) -> LimitResult:
    from calibration.probe.client import measure
    from calibration.verify import verify_limit
    from planner import estimate, max_batch

    result = max_batch(**options, tell=tell)

    def estimate_at(batch: int) -> Estimate:
        found: Estimate = estimate(batch=batch, **options, tell=tell).estimate
        return found

    check = verify_limit(result.plan, estimate_at, options["alloc_conf"] or "", tell, measure)
    return LimitResult(check, result.import_seconds)
