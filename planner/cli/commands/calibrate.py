"""The command `planner calibrate`. Measuring code is imported when it runs: no other command needs it."""

from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from planner.cli.options import JOB, AllocConf, Answer, option, option_flag, parse_int, with_options
from planner.cli.paths import folder_to_write
from planner.errors import ModelError, UsageError
from planner.hardware.calibration import Fit
from planner.jobs import allowed_sources, check_count, require_one_size
from planner.program import LARGEST_BATCH, OnProgress
from planner.report import Campaign, Report, Result, report_of

if TYPE_CHECKING:
    from calibration.calibrate import CalibrationResult

DEFAULT_MINUTES = 10.0


@dataclass(frozen=True, slots=True)
class CalibrateResult(Result):
    """The result of `planner calibrate`: its runs and the calibrations fitted to them."""

    campaign: Campaign

    def _report(self) -> Report:
        from planner.report import campaign_document, campaign_to_json

        return report_of(campaign_document, campaign_to_json, self.campaign)


@with_options(JOB)
def calibrate_command(
    options: dict[str, Any],
    on_progress: OnProgress,
    batches: Annotated[
        str | None, option("N,N,...", "Batch sizes for --model, at least four, such as 8,16,32,64.")
    ],
    campaign: Annotated[
        str | None,
        option("FILE", "Measure the jobs of a campaign file; standard and quick are included."),
    ],
    import_dir: Annotated[
        Path | None, option("DIR", "Import records of a measuring script; needs no GPU.", "--import")
    ],
    alloc_conf: AllocConf,
    minutes: Annotated[float | None, option("N", "Time limit, 10 by default; the next call continues.")],
    out: Annotated[Path | None, option("DIR", "Output folder; by default the user's data folder.")],
) -> Answer:
    """Measure a model on this machine's GPU and store a calibration."""
    sources = {"--model": options["model"], "--campaign": campaign, "--import": import_dir}
    given = [flag for flag, value in sources.items() if value is not None]
    if len(given) != 1:
        named = " and ".join(given) or "nothing to measure"
        raise UsageError(f"{named}: give one of --model NAME, --campaign FILE and --import DIR")
    if options["model"] is None:
        others = options | {"batches": batches, "alloc_conf": alloc_conf}
        if campaign is not None:
            del others["allow_code"]
        elif minutes is not None:
            raise UsageError("--minutes and --import: records are taken over without measuring; leave one")
        _reject_combined(given[0], others)
    folder = folder_to_write(out)
    limit = DEFAULT_MINUTES if minutes is None else minutes
    if import_dir is not None:
        measured = _import(import_dir, folder, on_progress)
    elif campaign is not None:
        measured = _measure_campaign(campaign, options, folder, limit, on_progress)
    else:
        measured = _measure(options, _batches(batches), alloc_conf or "", folder, limit, on_progress)
    fitted = any(isinstance(one.fit, Fit) for one in measured.calibrations)
    return CalibrateResult(measured), fitted or bool(measured.limits)


def _reject_combined(flag: str, options: dict[str, Any]) -> None:
    """Raise UsageError if an option in `options` is given, since it has no effect with `flag`."""
    for name, value in options.items():
        if name not in ("cache", "warn") and value is not None:
            raise UsageError(f"{option_flag(name)} and {flag}: the latter defines what is run; leave one")


def _measure(
    options: dict[str, Any],
    batches: list[int],
    alloc_conf: str,
    folder: Path,
    minutes: float,
    on_progress: OnProgress,
) -> Campaign:
    from calibration.calibrate import calibrate
    from planner.api import Options, make_job
    from planner.api.request.request import reject_sources

    reject_sources(options, "calibrate")
    model = options.pop("model")
    job, _, _ = make_job(model, cast(Options, options))
    require_one_size(job)
    measured = _campaign(calibrate(job, batches, folder, minutes, on_progress, alloc_conf), folder)
    if measured.failures and not measured.calibrations:
        raise ModelError(measured.failures[0])
    return measured


def _campaign(result: "CalibrationResult", folder: Path) -> Campaign:
    campaign = result.campaign
    failures, limits = (*campaign.failures, *result.failures), tuple(campaign.limits)
    new, remaining = campaign.new, campaign.remaining
    return Campaign(folder, new, remaining, limits, result.calibrations, failures, (), date.today())


def _measure_campaign(
    name: str, options: dict[str, Any], folder: Path, minutes: float, on_progress: OnProgress
) -> Campaign:
    from calibration.calibrate import calibrate_campaign
    from calibration.campaign_file import INCLUDED

    path = INCLUDED.get(name) or Path(name)
    return _campaign(calibrate_campaign(folder, minutes, on_progress, path, allowed_sources(options)), folder)


def _import(source: Path, folder: Path, on_progress: OnProgress) -> Campaign:
    from calibration.calibrate import import_records

    if not source.is_dir():
        raise UsageError(f"--import {source}: no such folder")
    records = import_records(source, folder, on_progress)
    return Campaign(folder, 0, 0, (), records.calibrations, records.failures, records.skipped, date.today())


def _batches(text: str | None) -> list[int]:
    if text is None:
        raise UsageError("--batches is missing: give at least four batch sizes, such as 8,16,32,64")
    sizes = [parse_int("--batches", part.strip()) for part in text.split(",")]
    return [check_count("--batches", size, LARGEST_BATCH) for size in sizes]
