"""`planner verify`. What measures is imported where it runs: no other command needs it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from planner.calibrated import is_card
from planner.cli.calibrate import refuse_trace
from planner.cli.estimate import BatchOptions
from planner.cli.options import CalibrationOptions, CardOptions, JobOptions, OutputOptions, takes, whole
from planner.cli.output import answer, working
from planner.device import GENERIC_CONTEXT, Device, FigureKind, Measured, generic_usable, load_devices
from planner.errors import UsageError
from planner.report.as_json import SCHEMA, estimate_to_json
from planner.report.figures import mib
from planner.report.layout import DIGITS, NAMES, entry, job_text, signed_percent, wrapped

if TYPE_CHECKING:
    from calibration.commands import Verification
    from calibration.request import Gpu


@dataclass(frozen=True, slots=True)
class Report:
    """A run held against its estimate, for people and for scripts."""

    verification: "Verification"
    import_seconds: float

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of `planner verify`; `errors` are estimated over measured less 1."""
        held, seen = self.verification, self.verification.observation
        return {
            "schema": SCHEMA,
            "model": seen.job.model,
            "batch": seen.batch,
            "gpu": seen.gpu,
            "ran": held.ran,
            "agrees": held.agrees,
            "holds": held.holds,
            "errors": {name: round(error, 6) for name, error in held.errors.items()},
            "measured": {f"{name}_mib": None if size is None else mib(size) for name, size in self._seen()}
            | {"retries": seen.retries, "oom": seen.oom},
            "estimate": estimate_to_json(held.estimate, self.import_seconds),
        }

    def __str__(self) -> str:
        held, confidence = self.verification, self.verification.estimate.budget.confidence
        verdict = "held" if held.holds else "did NOT hold"
        said = f"Confidence {confidence:g} {verdict}: batch {held.observation.batch} {self._told()}"
        lines = [*wrapped("", said), *entry("Job", job_text(held.estimate.job))]
        lines += ["", f"{held.observation.gpu:<{NAMES + 2}}{'said':>12}{'measured':>12}{'error':>9}   MiB"]
        return "\n".join([*lines, *self._rows()])

    def _told(self) -> str:
        held = self.verification
        said = {"yes": "said to fit", "with_retries": "said to fit with retries", "no": "said not to fit"}
        outcome = said[held.estimate.outcome.value]
        if not held.ran:
            return f"was {outcome} and ran out of memory"
        passed = "" if held.holds else ", but took more than the upper bound"
        return f"was {outcome} and ran{passed}"

    def _rows(self) -> list[str]:
        held, seen = self.verification, dict(self._seen())
        upper = held.estimate.process_upper_bytes
        rows = [
            ("allocated", "peak allocated", held.estimate.run.peak_allocated_bytes, seen["peak_allocated"]),
            ("reserved", "peak reserved", held.estimate.run.peak_reserved_bytes, seen["peak_reserved"]),
            ("process", "process", held.estimate.process_bytes, seen["process_peak"]),
            ("", "process, at most", upper, None),
        ]
        lines = []
        for name, title, said, size in rows:
            error = signed_percent(held.errors[name]) if name in held.errors else "-"
            measured = "-" if size is None else f"{mib(size, DIGITS):,.1f}"
            lines.append(f"  {title:<{NAMES}}{mib(said, DIGITS):>12,.1f}{measured:>12}{error:>9}")
        return lines

    def _seen(self) -> list[tuple[str, int | None]]:
        seen = self.verification.observation
        return [
            ("peak_allocated", seen.peak_allocated_bytes),
            ("peak_reserved", seen.peak_reserved_bytes),
            ("end_allocated", seen.end_allocated_bytes),
            ("process_peak", seen.process_peak_bytes),
            ("context_before", seen.context_before_bytes),
            ("context_after", seen.context_after_bytes),
        ]


@takes(BatchOptions, JobOptions, CardOptions, CalibrationOptions, OutputOptions)
def verify_command(
    size: BatchOptions,
    job: JobOptions,
    card: CardOptions,
    stored: CalibrationOptions,
    output: OutputOptions,
) -> int:
    """Run a batch on this machine's GPU and hold it against the estimate."""
    batch = whole("--batch", size.batch, "32")
    options = job.keywords() | card.keywords() | stored.keywords()
    refuse_trace(options, "verify")
    from calibration.commands import verify
    from calibration.measure import find_gpu, measure
    from planner import api

    with working() as tell:
        gpu = find_gpu()
        if options["gpu_mib"] is None:
            options["gpu"] = _card(gpu, options["gpu"])
        result = api.estimate(batch=batch, **options, tell=tell)
        estimate = result.estimate
        tell(f"running batch {estimate.run.batch} on {gpu.name}")
        found = verify(estimate.job, estimate.run.batch, estimate, options["alloc_conf"] or "", measure)
    answer(Report(found, result.import_seconds), output)
    return 0 if found.holds else 1


def _card(gpu: "Gpu", named: str | None) -> Device:
    """This machine's card, from the device database where it is known there.

    Raises UsageError where another one was named: a run here would say nothing of it.
    """
    from planner.device import find_device

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
        total=Measured(total_bytes, "NVML on this machine", kind=seen),
        usable=generic_usable(total_bytes)
        if usable_bytes is None
        else Measured(usable_bytes, "torch on this machine", kind=seen),
        context=GENERIC_CONTEXT,
        capability=versions.capability,
        capability_source="torch on this machine",
    )
