"""Diagnose why a process ran out of GPU memory, from a file that the process left.

The file is a log, snapshot, profile, history or record of a run.
"""

import gzip
import json
import os
import sys
import time
import zlib
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from errno import ENAMETOOLONG
from io import BufferedReader, TextIOWrapper
from os import PathLike
from pathlib import Path
from typing import Any, Unpack, cast

from planner._support.bounded_read import MIB, open_regular
from planner._support.conversion import shown
from planner.allocator.history import (
    is_profiler_trace,
    load_any_history,
    load_profiler_trace,
    load_snapshots,
)
from planner.api.advise import AdviceResult, VaryingAdviceResult, advise
from planner.api.request.options import Options
from planner.api.request.request import Model
from planner.errors import DataFileError, UsageError
from planner.planning.diagnosis import Diagnosis, diagnose_history, diagnose_log, diagnose_run
from planner.program import OnProgress, ignore_progress
from planner.report import Report, Result, report_of

_LARGEST_RECORD_BYTES = 2**26
_LARGEST_LOG_BYTES = 2**36
_SLOW_SNAPSHOT_BYTES = 2**27
_LONGEST_LINE = 2**16  # characters; the rest of a longer line is read as a separate line
_PICKLE, _GZIP = b"\x80", b"\x1f\x8b"
STANDARD_INPUT = "-"


@dataclass(frozen=True, slots=True)
class DiagnoseResult(Result):
    """The reason why a process ran out of GPU memory. `str` gives the text report."""

    file: str
    diagnosis: Diagnosis
    seconds: float
    advice: AdviceResult | VaryingAdviceResult | None = None  # None if no job was given

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
    """Return the reason why a process ran out of GPU memory.

    It is read from a file that the process left. The file is a log with an out-of-memory message (plain or
    gzip; "-": standard input), a pickle of `torch.cuda.memory._dump_snapshot`, a trace of `torch.profiler`
    (.json or .json.gz), a recorded history (.json.gz), or the JSON of `planner run`. Logs may have any size.
    Nothing in a pickle is executed. With `model`, `batch` and options of `planner.advise` the result also has
    the smallest changes that make the job fit. Raises UsageError if `file` is no path, DataFileError for a
    file that cannot be read or has another format, and the errors of `planner.advise`.
    """
    begin = time.perf_counter()
    if not isinstance(file, str | PathLike):
        raise UsageError(
            f"diagnose takes the path of a log, memory snapshot or history, not {type(file).__name__}: write "
            "an error's traceback to a file, or run the code within planner.watch()"
        )
    name = str(file)
    on_progress = options.get("on_progress") or ignore_progress
    diagnosis = _of_standard_input() if name == STANDARD_INPUT else _of_file(Path(file), on_progress)
    advice = None if model is None else advise(model, batch, **options)
    return DiagnoseResult(name, diagnosis, time.perf_counter() - begin, advice)


def _of_standard_input() -> Diagnosis:
    file = BufferedReader(cast("Any", sys.stdin.buffer))
    try:
        return _of_log(file, STANDARD_INPUT)
    finally:
        file.detach()  # else it closes standard input


def _is_text(name: str) -> bool:
    """Return whether `name` is not a file's name but text: several lines, or an out-of-memory message."""
    return "\n" in name or diagnose_log([name]) is not None


def _text_error(text: str) -> UsageError:
    return UsageError(
        f"diagnose takes the path of a file, not its text {shown(text)}: write the text to a file first"
    )


def _of_file(path: Path, on_progress: OnProgress) -> Diagnosis:
    if "\0" in str(path):
        raise _text_error(str(path))
    try:
        with open_regular(path, _LARGEST_LOG_BYTES) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            beginning = file.read(4096)
            is_trace = is_profiler_trace(beginning)
            if not is_trace and not beginning.startswith((_PICKLE, _GZIP)):
                file.seek(0)
                return _of_text(file, str(path))
    except OSError as error:
        if error.errno == ENAMETOOLONG or _is_text(str(path)):
            raise _text_error(str(path)) from error
        raise DataFileError(f"{path}: cannot be read: {error.strerror or error}") from error
    if is_trace:
        history = load_profiler_trace(path)
        return diagnose_history(history, f"trace of torch.profiler, {history.gpu}")
    if beginning.startswith(_PICKLE):
        if size_bytes >= _SLOW_SNAPSHOT_BYTES:
            on_progress(f"reading {size_bytes // MIB:,} MiB, which takes a minute for every 300")
        histories = load_snapshots(path)
        if not histories:
            raise DataFileError(f"{path}: the snapshot has neither events nor segments: no GPU was used")
        failed = [one for one in histories if any(event.action == "oom" for event in one.events)]
        return diagnose_history((failed or list(histories))[0], "memory snapshot of torch")
    log = _of_packed_log(path)
    if log is not None:
        return log
    history = load_any_history(path)
    return diagnose_history(history, f"recorded history, {history.gpu}, torch {history.torch}")


def _of_packed_log(path: Path) -> Diagnosis | None:
    """Return the diagnosis of a log in a gzip file, or None if the file holds JSON or is broken."""
    with suppress(OSError, EOFError, zlib.error), gzip.open(path) as packed:
        file = BufferedReader(cast("Any", packed))
        if file.peek(1)[:1] != b"{":
            return _of_log(file, str(path))
    return None


def _of_text(file: BufferedReader, name: str) -> Diagnosis:
    """Return the diagnosis of a log or of the JSON record of `planner run`."""
    record = _record_in(file)
    if record is None:
        return _of_log(file, name)
    try:
        return diagnose_run(record)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        problem = " ".join(str(error).split())[:200]
        raise DataFileError(f"{name}: no record of planner run --json: {problem}") from error


def _record_in(file: BufferedReader) -> dict[str, Any] | None:
    """Return the record of `planner run` in a file, or None if the file has none. The file is rewound."""
    is_large = os.fstat(file.fileno()).st_size > _LARGEST_RECORD_BYTES
    if is_large or not file.peek(64).lstrip(BOM_UTF8 + b" \t\r\n").startswith(b"{"):
        return None
    try:
        record = json.loads(file.read())
    except (ValueError, RecursionError):  # a log whose first line begins with a brace
        return None
    finally:
        file.seek(0)
    return record if isinstance(record, dict) and "emulated" in record else None


def _of_log(file: BufferedReader, name: str) -> Diagnosis:
    diagnosis = diagnose_log(_lines(file))
    if diagnosis is None:
        where = "standard input" if name == STANDARD_INPUT else name
        raise DataFileError(
            f"{where}: has no out-of-memory message of PyTorch, and is no memory snapshot, history or record "
            "of planner run; give the log with its traceback"
        )
    return diagnosis


def _lines(file: BufferedReader) -> Iterator[str]:
    """Yield the lines of a log as text, in parts of at most `_LONGEST_LINE` characters.

    The log is decoded as UTF-16 if it begins with a UTF-16 byte order mark, else as UTF-8.
    """
    encoding = "utf-16" if file.peek(2)[:2] in (BOM_UTF16_LE, BOM_UTF16_BE) else "utf-8-sig"
    text = TextIOWrapper(file, encoding, "replace", newline="\n")
    try:
        while line := text.readline(_LONGEST_LINE):
            yield line
    finally:
        text.detach()
