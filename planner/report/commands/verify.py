"""The reports of `planner verify`: runs on this machine's GPU held against what was said of them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from planner.hardware.calibration import Observation, Origin
from planner.report.commands.as_json import SCHEMA, estimate_to_json
from planner.report.layout import DIGITS, NAMES, entry, job_text, signed_percent, wrapped
from planner.report.units import mib

if TYPE_CHECKING:
    from calibration.calibrate import LimitCheck, Verification


@dataclass(frozen=True, slots=True)
class Report:
    """A run held against its estimate, for people and for scripts."""

    verification: "Verification"
    import_seconds: float

    @property
    def holds(self) -> bool:
        """Whether what was said with the confidence is so."""
        return self.verification.holds

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of `planner verify`; `errors` are estimated over measured, or emulated, less 1."""
        held, seen = self.verification, self.verification.observation
        figures = {f"{name}_mib": None if size is None else mib(size) for name, size in _seen(seen)}
        figures |= {"retries": seen.retries, "oom": seen.oom}
        emulated = seen.source == "emulated"
        return {
            "schema": SCHEMA,
            "model": seen.job.model,
            "batch": seen.batch,
            "gpu": seen.gpu,
            "ran": held.ran,
            "agrees": held.agrees,
            "holds": held.holds,
            "verdict": _verdict(seen.source, held.holds),
            "errors": {name: round(error, 6) for name, error in held.errors.items()},
            "measured": None if emulated else figures,
            "emulated": figures if emulated else None,
            "estimate": estimate_to_json(held.estimate, self.import_seconds),
        }

    def __str__(self) -> str:
        held, confidence = self.verification, self.verification.estimate.budget.confidence
        start = _start(held.observation.source, confidence, held.holds)
        said = f"{start}: batch {held.observation.batch} {_told(held)}"
        lines = [*wrapped("", said), *entry("Job", job_text(held.estimate.job)), ""]
        return "\n".join([*lines, *_table(held.observation.gpu, held)])


@dataclass(frozen=True, slots=True)
class LimitReport:
    """A largest batch held against runs around it."""

    check: "LimitCheck"
    import_seconds: float

    @property
    def holds(self) -> bool:
        """Whether what was said with the confidence is so, of each batch."""
        return self.check.holds

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of `planner verify` without a batch; `runs` are those of one with a batch.

        `true_largest` says between which batch sizes the real one lies, as far as these runs tell.
        """
        check = self.check
        return {
            "schema": SCHEMA,
            "model": check.plan.job.model,
            "gpu": check.runs[0].observation.gpu,
            "confidence": check.plan.budget.confidence,
            "max_batch": check.plan.search.largest,
            "holds": check.holds,
            "verdict": _verdict(check.runs[0].observation.source, check.holds),
            "true_largest": {
                "at_least": check.lived,
                "at_most": None if check.died is None else check.died - 1,
            },
            "runs": [Report(run, self.import_seconds).to_dict() for run in check.runs],
        }

    def __str__(self) -> str:
        check, confidence = self.check, self.check.plan.budget.confidence
        source = check.runs[0].observation.source if check.runs else "measured"
        said = f"{_start(source, confidence, check.holds)}: the largest batch was said to be "
        lines = wrapped("", f"{said}{check.plan.search.largest}; {self._bracket()}")
        lines += entry("Job", job_text(check.plan.job))
        for run in check.runs:
            lines += ["", *wrapped("", f"Batch {run.observation.batch} {_told(run)}")]
            lines += _table(run.observation.gpu, run) if run.ran else []
        return "\n".join(lines)

    def _bracket(self) -> str:
        """What the runs say of the true largest batch."""
        lived, died = self.check.lived, self.check.died
        if died is None:
            return f"{lived} ran as well, and nothing larger was tried" if lived else "nothing was tried"
        if not lived:
            return f"it is smaller than {died}"
        return f"it is {lived}" if died - lived == 1 else f"it lies from {lived} to {died - 1}"


def _verdict(source: Origin, holds: bool) -> str:
    """Return one word; what an emulated GPU says proves nothing of a real one's context and kernels."""
    if source == "emulated":
        return "emulated"
    return "held" if holds else "did not hold"


def _start(source: Origin, confidence: float, holds: bool) -> str:
    verdict = "held" if holds else "did NOT hold"
    if source == "emulated":
        return f"Emulated, not measured; there confidence {confidence:g} {verdict}"
    return f"Confidence {confidence:g} {verdict}"


def _told(held: "Verification") -> str:
    """What was said of a run and what became of it."""
    said = {"yes": "said to fit", "with_retries": "said to fit with retries", "no": "said not to fit"}
    outcome = said[held.estimate.outcome.value]
    if not held.ran:
        return f"was {outcome} and ran out of memory"
    passed = "" if held.holds else ", but took more than the upper bound"
    return f"was {outcome} and ran{passed}"


def _table(title: str, held: "Verification") -> list[str]:
    """Each peak as it was said beside the measured or emulated one, in MiB."""
    seen = dict(_seen(held.observation))
    rows = [
        ("allocated", "peak allocated", held.estimate.run.peak_allocated_bytes, seen["peak_allocated"]),
        ("reserved", "peak reserved", held.estimate.run.peak_reserved_bytes, seen["peak_reserved"]),
        ("process", "process", held.estimate.process_bytes, seen["process_peak"]),
        ("", "process, at most", held.estimate.process_upper_bytes, None),
    ]
    lines = [f"{title:<{NAMES + 2}}{'said':>12}{held.observation.source:>12}{'error':>9}   MiB"]
    for name, title, said, size in rows:
        error = signed_percent(held.errors[name]) if name in held.errors else "-"
        measured = "-" if size is None else f"{mib(size, DIGITS):,.1f}"
        lines.append(f"  {title:<{NAMES}}{mib(said, DIGITS):>12,.1f}{measured:>12}{error:>9}")
    return lines


def _seen(seen: Observation) -> list[tuple[str, int | None]]:
    return [
        ("peak_allocated", seen.peak_allocated_bytes),
        ("peak_reserved", seen.peak_reserved_bytes),
        ("end_allocated", seen.end_allocated_bytes),
        ("process_peak", seen.process_peak_bytes),
        ("context_before", seen.context_before_bytes),
        ("context_after", seen.context_after_bytes),
    ]
