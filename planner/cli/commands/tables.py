"""`planner tables`."""

from dataclasses import dataclass
from datetime import date
from typing import Any

from planner.cli.folders import folders_to_read
from planner.cli.options import FolderOptions, OutputOptions, takes
from planner.cli.output import answer
from planner.report.commands import Shelf, tables_text, tables_to_json


@dataclass(frozen=True, slots=True)
class Tables:
    """The stored calibrations, folder by folder."""

    shelves: tuple[Shelf, ...]
    today: date

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of `planner tables`."""
        return tables_to_json(self.shelves, self.today)

    def __str__(self) -> str:
        return tables_text(self.shelves, self.today)


@takes(FolderOptions, OutputOptions)
def tables_command(where: FolderOptions, output: OutputOptions) -> int:
    """List stored calibrations with their versions and residuals."""
    from planner.hardware.calibration import load_folders, search_path

    folders = search_path(folders_to_read(where.calibrations))
    shelves = tuple(Shelf(str(folder), load_folders([folder])) for folder in folders)
    answer(Tables(shelves, date.today()), output)
    return 0
