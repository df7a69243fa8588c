"""`planner tables`."""

from dataclasses import dataclass
from datetime import date

from planner.cli.folders import folders_to_read
from planner.cli.options import FolderOptions, OutputOptions, takes
from planner.cli.output import answer
from planner.report import Folder, Result


@dataclass(frozen=True, slots=True)
class TablesResult(Result):
    """The stored calibrations, folder by folder."""

    folders: tuple[Folder, ...]
    today: date


@takes(FolderOptions, OutputOptions)
def tables_command(where: FolderOptions, output: OutputOptions) -> int:
    """List stored calibrations with their versions and residuals."""
    from planner.hardware.calibration import load_folders, search_path

    paths = search_path(folders_to_read(where.calibrations))
    folders = tuple(Folder(str(path), load_folders([path])) for path in paths)
    answer(TablesResult(folders, date.today()), output)
    return 0
