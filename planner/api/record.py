"""Convert a memory snapshot of torch to anonymous histories.

The histories are checked with the simulator.
"""

from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from planner.allocator.history import (
    History,
    HistoryCheck,
    PublishedHistory,
    anonymous_history,
    check_history,
    load_snapshots,
    save_published,
    with_events,
)
from planner.errors import UsageError, unsaved
from planner.report import Report, Result, report_of

_SUFFIX = ".json.gz"


@dataclass(frozen=True, slots=True)
class Recorded:
    """The history of one device, and the result of its replay in the simulator."""

    history: History
    check: HistoryCheck


@dataclass(frozen=True, slots=True)
class RecordResult(Result):
    """The histories in a snapshot, and the paths of the written files. `str` gives the text report."""

    source: Path
    recorded: tuple[Recorded, ...]  # one for each device
    written: tuple[Path, ...]  # empty if no file was named

    def _report(self) -> Report:
        from planner.report import record_document, record_to_json

        return report_of(record_document, record_to_json, self.source, self.recorded, self.written)


def record_snapshot(
    file: str | PathLike[str],
    out: str | PathLike[str] | None = None,
    *,
    gpu: str | None = None,
    torch: str | None = None,
    kind: str | None = None,
) -> RecordResult:
    """Read a memory snapshot of torch, and return its histories without names and paths.

    The file is a pickle of `torch.cuda.memory._dump_snapshot`. The histories are written to `out` if given.
    Nothing in the pickle is executed. `gpu`, `torch` and `kind` are the GPU, the version of torch and the
    kind of job, which a snapshot does not name. A snapshot of several devices is written to one file per
    device, NAME-gpuN.json.gz. Raises DataFileError for a file that is no snapshot, UnsavedError with the
    result if a history cannot be written, and UsageError if the name of `out` does not end with .json.gz.
    """
    source = Path(file)
    target = None if out is None else Path(out)
    if target is not None and not target.name.endswith(_SUFFIX):
        raise UsageError(f"--out {target}: the name of a history ends with {_SUFFIX}")
    histories = with_events(load_snapshots(source), source)
    recorded = []
    for history in histories:
        own = anonymous_history(history, gpu, torch)
        recorded.append(Recorded(own, check_history(own)))
    written: list[Path] = []
    with unsaved(RecordResult(source, tuple(recorded), ())):
        for device, one in zip((history.gpu for history in histories), recorded, strict=True):
            if target is not None:
                path = target if len(recorded) == 1 else _of_device(target, device)
                name = path.name.removesuffix(_SUFFIX)
                save_published(PublishedHistory(name, "", kind or "", one.history), path)
                written.append(path)
    return RecordResult(source, tuple(recorded), tuple(written))


def _of_device(path: Path, device: str) -> Path:
    number = device.rpartition(" ")[2]
    return path.with_name(f"{path.name.removesuffix(_SUFFIX)}-gpu{number}{_SUFFIX}")
