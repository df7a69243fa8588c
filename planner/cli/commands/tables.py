"""`planner tables`."""

from dataclasses import dataclass
from datetime import date

from planner.cli.options import Answer, Calibrations, with_options
from planner.cli.paths import folders_to_read
from planner.report import Folder, Result


@dataclass(frozen=True, slots=True)
class TablesResult(Result):
    """The stored calibrations, folder by folder."""

    folders: tuple[Folder, ...]
    today: date


@with_options()
def tables_command(calibrations: Calibrations) -> Answer:
    """List stored calibrations with their versions and residuals."""
    from planner.hardware.calibration import load_folders, search_path

    paths = search_path(folders_to_read(calibrations))
    folders = tuple(Folder(str(path), load_folders([path])) for path in paths)
    return TablesResult(folders, date.today()), True
