"""Tell why a process ran out of GPU memory, from its log, snapshot, recorded history or run."""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, Unpack

from planner._support.bounded_read import open_regular, read_text
from planner.allocator.history import load_any_history, load_snapshots
from planner.api.advise import AdviceResult, VaryingAdviceResult, advise
from planner.api.options import Options
from planner.api.request import Model
from planner.errors import DataFileError
from planner.planning.diagnosis import Diagnosis, diagnose_history, diagnose_log, diagnose_run
from planner.report import Report, Result, report_of

_LARGEST_RECORD_BYTES = 2**26
_LARGEST_LOG_BYTES = 2**36
_LONGEST_LINE_BYTES = 2**16  # the rest of a longer line is read as a line of its own
_PICKLE, _GZIP = b"\x80", b"\x1f\x8b"
STANDARD_INPUT = "-"


@dataclass(frozen=True, slots=True)
class DiagnoseResult(Result):
    """The reason why a process ran out of GPU memory; `str` gives the text report."""

    file: str
    diagnosis: Diagnosis
    seconds: float
    advice: AdviceResult | VaryingAdviceResult | None = None  # on the job, if one was given

    def _report(self) -> Report:
        from planner.report import diagnosis_document, diagnosis_to_json

        advice = None if self.advice is None else self.advice._report()
        return report_of(diagnosis_document, diagnosis_to_json, self.diagnosis, self.seconds, advice)


def diagnose(
    file: str | PathLike[str],
    model: Model | None = None,
    batch: int | None = None,
    **options: Unpack[Options],
) -> DiagnoseResult:
    """Tell why a process ran out of GPU memory, from a file that it left.

    The file is a log with an out-of-memory message ("-": standard input), a pickle of
    `torch.cuda.memory._dump_snapshot`, a recorded history (.json.gz), or the JSON of `planner run`. Logs may
    have any size. Nothing in a pickle is executed. With `model`, `batch` and options of `planner.advise` the
    result also has the smallest changes with which that job fits. Raises DataFileError for a file that cannot
    be read or has none of these, and the errors of `planner.advise`.
    """
    begin = time.perf_counter()
    name = str(file)
    diagnosis = _of_log(sys.stdin.buffer, name) if name == STANDARD_INPUT else _of_file(Path(file))
    advice = None if model is None else advise(model, batch, **options)
    return DiagnoseResult(name, diagnosis, time.perf_counter() - begin, advice)


def _of_file(path: Path) -> Diagnosis:
    try:
        with open_regular(path, _LARGEST_LOG_BYTES) as file:
            beginning = file.read(4096)
            if not beginning.startswith((_PICKLE, _GZIP)) and not _is_record(beginning):
                file.seek(0)
                return _of_log(file, str(path))
    except OSError as error:
        raise DataFileError(f"{path}: cannot be read: {error.strerror or error}") from error
    if beginning.startswith(_PICKLE):
        histories = load_snapshots(path)
        if not histories:
            raise DataFileError(f"{path}: the snapshot has neither events nor segments: no GPU was used")
        failed = [one for one in histories if any(event.action == "oom" for event in one.events)]
        return diagnose_history((failed or list(histories))[0], "memory snapshot of torch")
    if beginning.startswith(_GZIP):
        history = load_any_history(path)
        return diagnose_history(history, f"recorded history, {history.gpu}, torch {history.torch}")
    return _of_record(path)


def _is_record(beginning: bytes) -> bool:
    return beginning.lstrip().startswith(b"{") and b'"emulated"' in beginning


def _of_record(path: Path) -> Diagnosis:
    try:
        record: Any = json.loads(read_text(path, _LARGEST_RECORD_BYTES))
        return diagnose_run(record)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
        problem = " ".join(str(error).split())[:200]
        raise DataFileError(f"{path}: no record of planner run --json: {problem}") from error


def _of_log(file: BinaryIO, name: str) -> Diagnosis:
    diagnosis = diagnose_log(_lines(file))
    if diagnosis is None:
        where = "standard input" if name == STANDARD_INPUT else name
        raise DataFileError(
            f"{where}: has no out-of-memory message of PyTorch, and is no memory snapshot, history or record "
            "of planner run; give the log with its traceback"
        )
    return diagnosis


def _lines(file: BinaryIO) -> Iterator[str]:
    while line := file.readline(_LONGEST_LINE_BYTES):
        yield line.decode("utf-8", "replace")
