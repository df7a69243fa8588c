"""`planner calibrate`. What measures is imported where it runs: no other command needs it."""

from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from planner.cli.declared import AllocConf
from planner.cli.folders import folder_to_write
from planner.cli.options import JobOptions, OutputOptions, Text, takes, whole
from planner.cli.output import answer, working
from planner.cli.words import Option
from planner.errors import ModelError, UsageError
from planner.hardware.calibration import Fit
from planner.jobs import allowed_sources, check_count, shown
from planner.planning import LARGEST_BATCH, OnProgress
from planner.report import Campaign, Result

if TYPE_CHECKING:
    from calibration.calibrate import CalibrationResult, ImportResult

DEFAULT_MINUTES = 10.0
STANDARD = "standard"  # the campaign that ships


@dataclass(frozen=True, slots=True)
class CampaignOptions:
    """What is measured, for how long, and where it is kept."""

    batches: Annotated[
        Text, Option(metavar="N,N,...", help="Batch sizes for --model, at least four, such as 8,16,32,64.")
    ] = None
    campaign: Annotated[
        Text,
        Option(
            metavar="FILE",
            help="Measure the jobs of a campaign file instead of --model; standard is included.",
        ),
    ] = None
    import_dir: Annotated[
        Text,
        Option("--import", metavar="DIR", help="Import records of a measuring script; needs no GPU."),
    ] = None
    alloc_conf: AllocConf = None
    minutes: Annotated[
        Text, Option(metavar="N", help="Time limit, 10 by default; the next call continues.")
    ] = None
    out: Annotated[Text, Option(metavar="DIR", help="Output folder; by default the user's data folder.")] = (
        None
    )


@dataclass(frozen=True, slots=True)
class CalibrateResult(Result):
    """The runs of a call, and the calibrations that they give."""

    campaign: Campaign

    @property
    def can_plan(self) -> bool:
        """Whether there is a line or a limit to plan with."""
        fitted = any(isinstance(one.fit, Fit) for one in self.campaign.calibrations)
        return fitted or bool(self.campaign.limits)


@takes(JobOptions, CampaignOptions, OutputOptions)
def calibrate_command(job: JobOptions, campaign: CampaignOptions, output: OutputOptions) -> int:
    """Measure a model on this machine's GPU and store a calibration."""
    ways = [
        name
        for name, value in (
            ("--model", job.model),
            ("--campaign", campaign.campaign),
            ("--import", campaign.import_dir),
        )
        if value is not None
    ]
    if len(ways) != 1:
        said = " and ".join(ways) or "nothing to measure"
        raise UsageError(f"{said}: give one of --model NAME, --campaign FILE and --import DIR")
    if job.model is None:
        _refuse_beside(ways[0], job, campaign)
    folder, minutes = folder_to_write(campaign.out), _minutes(campaign.minutes)
    with working() as tell:
        if campaign.import_dir is not None:
            result = CalibrateResult(_import(Path(campaign.import_dir), folder, tell))
        else:
            result = CalibrateResult(_measure(job, campaign, folder, minutes, tell))
    answer(result, output)
    return 0 if result.can_plan else 1


def refuse_trace(options: dict[str, Any], command: str) -> None:
    """Raise UsageError where a saved trace is named: what is measured has to be a model; or isolation asked
    for, since it runs in a process of its own anyway.
    """
    from planner.capture.subprocess import refuse_isolation

    for name in ("trace", "save_trace"):
        if options.pop(name, None) is not None:
            raise UsageError(f"--{name.replace('_', '-')} and {command}, which runs a model; leave it away")
    refuse_isolation(options, command)


def _refuse_beside(way: str, job: JobOptions, campaign: CampaignOptions) -> None:
    """Raise UsageError for the first option that means nothing beside `way`."""
    told = job.keywords() | {
        **dict.fromkeys(("cache", "warn")),  # of no harm to anybody
        "allow_code": way != "--campaign" and job.allow_code,
        "batches": campaign.batches,
        "alloc_conf": campaign.alloc_conf,
    }
    given = [name for name, value in told.items() if value or (name == "grad_scaler" and value is not None)]
    if given:
        raise UsageError(f"--{given[0].replace('_', '-')} and {way}: it says itself what is run; leave one")
    if campaign.import_dir is not None and campaign.minutes is not None:
        raise UsageError("--minutes and --import: records are taken over without measuring; leave one")


def _measure(
    job: JobOptions, campaign: CampaignOptions, folder: Path, minutes: float, tell: OnProgress
) -> Campaign:
    from calibration.calibrate import calibrate, calibrate_campaign
    from calibration.campaign_file import STANDARD as STANDARD_FILE

    if campaign.campaign is not None:
        path = STANDARD_FILE if campaign.campaign == STANDARD else Path(campaign.campaign)
        sources = allowed_sources({"allow_code": job.allow_code})
        return _campaign(calibrate_campaign(folder, minutes, tell, path, sources), folder)
    from planner.api import Options, job_of

    keywords = job.keywords()
    refuse_trace(keywords, "calibrate")
    model = keywords.pop("model")
    wanted, _, _ = job_of(model, cast(Options, keywords))
    batches, alloc_conf = _batches(campaign.batches), campaign.alloc_conf or ""
    measured = _campaign(calibrate(wanted, batches, folder, minutes, tell, alloc_conf), folder)
    if measured.failures and not measured.calibrations:
        raise ModelError(measured.failures[0])
    return measured


def _campaign(found: "CalibrationResult", folder: Path) -> Campaign:
    campaign = found.campaign
    failures, limits = (*campaign.failures, *found.failures), tuple(campaign.limits)
    new, remaining = campaign.new, campaign.remaining
    return Campaign(folder, new, remaining, limits, found.calibrations, failures, (), date.today())


def _import(source: Path, folder: Path, tell: OnProgress) -> Campaign:
    from calibration.calibrate import import_records

    if not source.is_dir():
        raise UsageError(f"--import {source}: no such folder")
    found: ImportResult = import_records(source, folder, tell)
    return Campaign(folder, 0, 0, (), found.calibrations, found.failures, found.skipped, date.today())


def _batches(text: Text) -> list[int]:
    if text is None:
        raise UsageError("--batches is missing: give at least four batch sizes, such as 8,16,32,64")
    sizes = [whole("--batches", part.strip(), "8,16,32,64") or 0 for part in text.split(",")]
    for size in sizes:
        check_count("--batches", size, LARGEST_BATCH)
    return sizes


def _minutes(text: Text) -> float:
    if text is None:
        return DEFAULT_MINUTES
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"--minutes: {shown(text)} is refused; use a number, such as 10") from None
