"""Diagnose CUDA out-of-memory errors that are raised in a part of a program."""

import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import Any

from planner.api.diagnose import DiagnoseResult, diagnose
from planner.errors import reason_of
from planner.planning.diagnosis import diagnose_log

_MOST_ENTRIES = 200_000  # events that torch keeps; a step of a large model has some 20,000


@contextmanager
def watch(folder: str | PathLike[str] = ".", *, record: bool = False) -> Iterator[None]:
    """Write a memory snapshot and warn with a diagnosis if the context raises a CUDA out-of-memory error.

    The error is raised unchanged; a failed snapshot or diagnosis is a part of the warning. Without `record`
    nothing runs before an error, the snapshot has the blocks at the time of the error, and the diagnosis
    rests on the message and traceback of the error. With `record` torch, if it is imported on entry, records
    each allocation in the context (`torch.cuda.memory._record_memory_history`), which takes time and host
    memory; snapshot and diagnosis then have the history too. The snapshot is `out-of-memory-TIME.pickle` in
    `folder`.
    """
    if record:
        _record(_MOST_ENTRIES)
    try:
        yield
    except Exception as error:
        if _is_out_of_memory(error):
            with suppress(Exception):  # warnings may be errors
                _warn(error, Path(folder), record)
        raise
    finally:
        if record:
            with suppress(Exception):
                _record(None)


def _record(most_entries: int | None) -> None:
    """Start to record allocations, or stop if `most_entries` is None; do nothing without torch or a GPU."""
    cuda = _cuda()
    if cuda is not None and cuda.is_available():
        enabled = None if most_entries is None else "all"
        cuda.memory._record_memory_history(enabled, max_entries=most_entries or 1)


def _cuda() -> Any:
    """Return the module torch.cuda, or None if the program has not imported torch."""
    return getattr(sys.modules.get("torch"), "cuda", None)


def _is_out_of_memory(error: Exception) -> bool:
    kind = getattr(_cuda(), "OutOfMemoryError", None)
    return isinstance(kind, type) and isinstance(error, kind)


def _warn(error: Exception, folder: Path, record: bool) -> None:
    """Write a memory snapshot to `folder`, and warn with the file's path and a diagnosis of the error."""
    begin = time.perf_counter()
    path = folder / f"out-of-memory-{time.strftime('%Y%m%d-%H%M%S')}.pickle"
    told = f"memory snapshot written to {path}"
    try:
        _cuda().memory._dump_snapshot(str(path))
    except Exception as problem:
        told = f"no memory snapshot is written to {path}: {reason_of(problem)}"
    try:
        answer = str(diagnose(path)) if record else _of_message(error, begin)
    except Exception as problem:
        answer = f"no diagnosis: {reason_of(problem)}"
    warnings.warn(f"planner.watch: {told}\n{answer}", stacklevel=4)


def _of_message(error: Exception, begin: float) -> str:
    found = diagnose_log("".join(traceback.format_exception(error)).splitlines())
    if found is None:
        return "the error has no message of PyTorch's allocator, so that it decides nothing"
    return str(DiagnoseResult("", found, time.perf_counter() - begin))
