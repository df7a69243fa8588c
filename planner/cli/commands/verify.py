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
from planner.errors import UsageError
from planner.hardware import (
    GENERIC_CONTEXT,
    Device,
    FigureKind,
    SourcedBytes,
    generic_usable,
    load_devices,
)
from planner.hardware.calibration import is_card
from planner.planning import Estimate, OnProgress
from planner.report import Result

if TYPE_CHECKING:
    from calibration.calibrate import LimitCheck, Verification
    from calibration.probe.request import Gpu


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
            options["gpu"] = _card(gpu, options["gpu"])
        report: VerifyResult | LimitResult
        report = _verify_limit(options, tell) if batch is None else _verify_batch(batch, options, tell)
    answer(report, output)
    return 0 if report.holds else 1


def _verify_batch(batch: int, options: dict[str, Any], tell: OnProgress) -> VerifyResult:
    from calibration.calibrate import verify
    from calibration.probe.client import measure
    from planner import estimate

    result = estimate(batch=batch, **options, tell=tell)
    planned = result.estimate
    tell(f"running batch {planned.run.batch}")
    found = verify(planned.job, planned.run.batch, planned, options["alloc_conf"] or "", measure)
    return VerifyResult(found, result.import_seconds)


def _verify_limit(options: dict[str, Any], tell: OnProgress) -> LimitResult:
    from calibration.calibrate import verify_limit
    from calibration.probe.client import measure
    from planner import estimate, max_batch

    result = max_batch(**options, tell=tell)

    def estimate_at(batch: int) -> Estimate:
        found: Estimate = estimate(batch=batch, **options, tell=tell).estimate
        return found

    check = verify_limit(result.plan, estimate_at, options["alloc_conf"] or "", tell, measure)
    return LimitResult(check, result.import_seconds)


def _card(gpu: "Gpu", named: str | None) -> Device:
    """This machine's card, from the device database where it is known there.

    Raises UsageError where another one was named: a run here would say nothing of it.
    """
    from planner.hardware import find_device

    if named is not None:
        device = find_device(named)
        if not is_card(device, gpu.name, gpu.versions):
            raise UsageError(f"--gpu {named}: this machine has {gpu.name}; leave --gpu away")
        return device
    known = [device for device in load_devices() if is_card(device, gpu.name, gpu.versions)]
    return known[0] if known else _unknown_card(gpu)


def _unknown_card(gpu: "Gpu") -> Device:
    """A card by what the driver and torch say of it."""
    versions = gpu.versions
    total_bytes = versions.nvml_total_bytes or versions.torch_total_bytes
    if total_bytes is None:
        raise UsageError(f"{gpu.name}: its memory is not known; give --gpu-mib N as nvidia-smi shows it")
    usable_bytes = versions.torch_total_bytes
    seen = FigureKind.MEASURED
    return Device(
        name=gpu.name,
        total=SourcedBytes(total_bytes, "NVML on this machine", kind=seen),
        usable=generic_usable(total_bytes)
        if usable_bytes is None
        else SourcedBytes(usable_bytes, "torch on this machine", kind=seen),
        context=GENERIC_CONTEXT,
        capability=versions.capability,
        capability_source="torch on this machine",
    )
