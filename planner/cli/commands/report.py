"""The command `planner report`: pack measurements of this machine for an issue or a pull request."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument

from planner.cli.options import Answer, flag, option, with_options
from planner.errors import UsageError
from planner.hardware.calibration import (
    Calibration,
    calibration_text,
    check_contribution,
    file_name,
    load_calibration,
    pack,
    write_calibration,
)
from planner.report import Report, Result, report_of

_NOTHING = "FILE is missing: name a calibration (a .yaml of planner tables) or an observation (runs/*.json)"


@dataclass(frozen=True, slots=True)
class ReportResult(Result):
    """The packed calibrations, or the checked files and their problems. Files are checked with `--check`."""

    packed: tuple[str, ...]  # the text of each packed calibration
    written: tuple[str, ...]  # paths of the files; empty if the user did not agree
    checked: tuple[str, ...]
    problems: tuple[str, ...]

    def _report(self) -> Report:
        from planner.report import contribution_document, contribution_to_json

        return report_of(
            contribution_document,
            contribution_to_json,
            self.packed,
            self.written,
            self.checked,
            self.problems,
        )


@with_options()
def report_command(
    files: Annotated[
        list[str] | None, Argument(metavar="FILE...", help="Calibrations, or observations of a guard.")
    ],
    check: Annotated[bool | None, flag("--check", "Check contributed files; write nothing.")],
    out: Annotated[Path | None, option("DIR", "Output folder; by default the current one.")],
    yes: Annotated[bool | None, flag("--yes", "Write without asking, for scripts.")],
) -> Answer:
    """Pack measured peaks for an issue or a pull request, without anything private."""
    if not files:
        raise UsageError(_NOTHING)
    paths = tuple(map(Path, files))
    if check:
        if out is not None or yes:
            raise UsageError("--check writes nothing: remove --out and --yes")
        problems = [problem for path in paths for problem in check_contribution(path)]
        return ReportResult((), (), tuple(map(str, paths)), tuple(problems)), not problems
    calibrations = [pack(_calibration_of(path)) for path in paths]
    texts = tuple(map(calibration_text, calibrations))
    folder = out or Path()
    targets = [folder / file_name(one.key) for one in calibrations]
    if not (yes or _agreed(texts, targets)):
        return ReportResult(texts, (), (), ()), False
    for target, calibration in zip(targets, calibrations, strict=True):
        write_calibration(target, calibration)
    return ReportResult(texts, tuple(map(str, targets)), (), ()), True


def _calibration_of(path: Path) -> Calibration:
    """Return the calibration in a YAML file, or the stored calibration that contains the run in a JSON file.

    Raises UsageError if the run is emulated or no calibration in the calibrations' folder has it, and
    DataFileError if a file cannot be read.
    """
    if path.suffix != ".json":
        return load_calibration(path)
    from calibration.observations import load_observation

    run, folder = load_observation(path), path.absolute().parent.parent
    if run.source == "emulated":
        raise UsageError(f"{path}: an emulated run; only what was measured on a real GPU is contributed")
    for other in sorted(folder.glob("*.yaml")):
        calibration = load_calibration(other)
        if any(_is_same_run(point.observation, run) for point in calibration.points):
            return calibration
    raise UsageError(f"{path}: no calibration in {folder} has this run; name a calibration (planner tables)")


def _is_same_run(one: object, other: object) -> bool:
    names = ("batch", "gpu", "versions", "when", "peak_allocated_bytes", "peak_reserved_bytes")
    return all(getattr(one, name) == getattr(other, name) for name in names)


def _agreed(texts: tuple[str, ...], targets: list[Path]) -> bool:
    """Print the files to be written, and return whether the user agrees.

    The files are printed on standard error. Raises UsageError if standard input is not a terminal.
    """
    for target, text in zip(targets, texts, strict=True):
        sys.stderr.write(f"{target}:\n{text}\n")
    if not sys.stdin.isatty():
        raise UsageError("nobody can be asked here: read the text above, then give --yes")
    sys.stderr.write("Write this? Nothing is sent anywhere. [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")
