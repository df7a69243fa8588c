"""The command `planner tables`."""

from dataclasses import dataclass
from datetime import date

from planner.cli.options import Answer, Calibrations, with_options
from planner.cli.paths import folders_to_read
from planner.report import Folder, Report, Result, report_of


@dataclass(frozen=True, slots=True)
class TablesResult(Result):
    """The stored calibrations, folder by folder."""

    folders: tuple[Folder, ...]
    today: date

    def _report(self) -> Report:
        from planner.report import tables_document, tables_to_json

        return report_of(tables_document, tables_to_json, self.folders, self.today)


@with_options()
def tables_command(calibrations: Calibrations) -> Answer:
    """List stored calibrations with their versions and residuals."""
    from planner.hardware.calibration import load_folders, search_path

    paths = search_path(folders_to_read(calibrations))
    folders = tuple(Folder(str(path), load_folders([path])) for path in paths)
    return TablesResult(folders, date.today()), True
