"""The report of `planner calibrate`."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from calibration.campaign import FoundLimit
from planner.hardware.calibration import Calibration
from planner.report.commands.calibrations.tables import calibration_section, calibration_to_json
from planner.report.document import Block, Document, Entry, Paragraph
from planner.report.units import SCHEMA, attributes, mib, mib_text


@dataclass(frozen=True, slots=True)
class Campaign:
    """The runs that a call measured or imported."""

    folder: Path
    new: int  # runs made by this call
    left: int  # series that the time did not suffice for
    limits: Sequence[FoundLimit]
    calibrations: Sequence[Calibration]
    failures: Sequence[str]
    set_aside: Sequence[str]
    today: date


def campaign_document(campaign: Campaign) -> Document:
    """Return what a call measured or imported, and each calibration."""
    count = f"{campaign.new} new run{'' if campaign.new == 1 else 's'}"
    head: list[Block] = [Paragraph(f"{count}, kept in {campaign.folder}")]
    if campaign.left:
        head.append(Paragraph(f"Time is up with {campaign.left} series left: call again to go on"))
    head += [Paragraph(f"Largest batch {_limit_text(one)}") for one in campaign.limits]
    head += [Entry("Failed", text) for text in campaign.failures]
    head += [Entry("Set aside", text) for text in campaign.set_aside]
    return Document.of(head, *(calibration_section(one, campaign.today) for one in campaign.calibrations))


def _limit_text(one: FoundLimit) -> str:
    size = f"{'' if one.limit.is_exact else 'at least '}{one.limit.largest:,}"
    return f"{size}: {one.job.model} with {one.job.optimizer} under {mib_text(one.cap_bytes, 0)} MiB"


def campaign_to_json(campaign: Campaign) -> dict[str, Any]:
    """Return the JSON object of `planner calibrate`."""
    return {
        "schema": SCHEMA,
        "folder": str(campaign.folder),
        "new_runs": campaign.new,
        "series_left": campaign.left,
        "limits": [
            {
                "model": one.job.model,
                "cap_mib": mib(one.cap_bytes),
                "max_batch": one.limit.largest,
                "exact": one.limit.is_exact,
            }
            for one in campaign.limits
        ],
        "calibrations": [calibration_to_json(one, campaign.today) for one in campaign.calibrations],
        **attributes(campaign, "failures", "set_aside"),
    }
