"""Diagnose CUDA out-of-memory errors in a part of a program."""

import importlib
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from os import PathLike
from pathlib import Path
from typing import Any

from planner.api.diagnose import DiagnoseResult, diagnose
from planner.errors import reason_of
from planner.planning.diagnosis import Cause, Diagnosis, diagnose_log

_MOST_ENTRIES = 200_000  # events that torch keeps; a step of a large model has some 20,000


@contextmanager
def watch(folder: str | PathLike[str] = ".", *, record: bool = False) -> Iterator[None]:
    """Write a memory snapshot and warn with a diagnosis if the context raises a CUDA out-of-memory error.

    The error is torch's OutOfMemoryError, or a RuntimeError whose message or cause reports a lack of GPU
    memory. It is raised unchanged; a failed snapshot or diagnosis is part of the warning. Without `record`
    nothing runs before an error, the snapshot has the blocks at the time of the error, and the diagnosis
    rests on the message and traceback of the error. With `record` torch is imported and records each
    allocation in the context (`torch.cuda.memory._record_memory_history`), which takes time and host memory,
    unless it already records; snapshot and diagnosis then have the history too. The snapshot is
    `out-of-memory-TIME.pickle` in `folder`, or `out-of-memory-TIME-2.pickle` and so on if another error or
    process has written a file of that name.
    """
    with ExitStack() as recording:
        if record:
            recording.enter_context(_recording())
        try:
            yield
        except Exception as error:
            with suppress(Exception):  # warnings may be errors
                found = _diagnose_error(error)
                if found is not None:
                    _warn(found, Path(folder), record)
            raise


@contextmanager
def _recording() -> Iterator[None]:
    """Record allocations in the context, unless torch has no GPU or already records."""
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        yield
        return
    torch.cuda.init()  # else the next call ends the process by a signal; it makes no context on a GPU
    if getattr(torch._C, "_cuda_isHistoryEnabled", bool)():  # since torch 2.1
        yield
        return
    torch.cuda.memory._record_memory_history("all", max_entries=_MOST_ENTRIES)
    try:
        yield
    finally:
        with suppress(Exception):
            torch.cuda.memory._record_memory_history(None)


def _cuda() -> Any:
    """Return the module torch.cuda, or None if the program has not imported torch."""
    return getattr(sys.modules.get("torch"), "cuda", None)


def _diagnose_error(error: Exception) -> Diagnosis | None:
    """Return the diagnosis of an exception, or None if no GPU ran out of memory.

    Its message and traceback are read. An OutOfMemoryError without a message of PyTorch's allocator has the
    cause UNKNOWN.
    """
    if _cuda() is None or not isinstance(error, RuntimeError):
        return None
    found = diagnose_log("".join(traceback.format_exception(error)).splitlines())
    if isinstance(error, _cuda().OutOfMemoryError):
        reason = "the error has no message of PyTorch's allocator, so that it decides nothing"
        return found or Diagnosis("error", Cause.UNKNOWN, reason)
    return None if found is None or found.is_of_host else found


def _warn(of_message: Diagnosis, folder: Path, record: bool) -> None:
    """Write a memory snapshot to `folder`, and issue a warning with a diagnosis.

    The warning names the file. The history of the snapshot is diagnosed if it has been recorded and has a
    failed request, else the message.
    """
    answer = str(DiagnoseResult("", of_message, 0.0))
    try:
        path = _write_snapshot(folder)
    except Exception as problem:
        told = f"no memory snapshot is written to {folder}: {reason_of(problem)}"
    else:
        told = f"memory snapshot written to {path}"
        with suppress(Exception):
            by_history = diagnose(path) if record else None
            if by_history is not None and by_history.diagnosis.requested_bytes is not None:
                answer = str(by_history)
    warnings.warn(f"planner.watch: {told}\n{answer}", stacklevel=4)


def _write_snapshot(folder: Path) -> Path:
    """Write a memory snapshot to a new file in `folder`, and return the file's path."""
    name = f"out-of-memory-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in count(1):
        path = folder / (f"{name}.pickle" if number == 1 else f"{name}-{number}.pickle")
        with suppress(FileExistsError):
            path.open("xb").close()  # other ranks, and earlier errors, write to the same folder
            break
    try:
        _cuda().memory._dump_snapshot(str(path))
    except BaseException:
        path.unlink()
        raise
    return path
