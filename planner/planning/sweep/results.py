"""What a sweep has found, in a folder: a file for each job that was run, whole or not there.

A file's name ends in digests of what decides its figures (job, memory, versions, the planner's own code,
calibrations) and of the GPUs in it, so that no two runs write other things under one name, and any number of
sweeps may share a folder. A file that is broken or foreign is told of and its cells are computed anew.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from planner._support.atomic_write import write_bytes
from planner.emulator import open_cudnn_with_cublaslt
from planner.errors import DataFileError, UsageError
from planner.hardware.calibration import search_path
from planner.jobs import Job, split_model
from planner.planning.sweep.task import Done, Task, device_digest, task_to_json
from planner.store import key_of

SCHEMA = 1
LARGEST_FILE_BYTES = 2**24  # a cell takes 600
_PACKAGE = Path(__file__).parents[2]
_CELL: dict[str, tuple[type, ...]] = {
    "gpu": (str,),
    "total_mib": (int, float),
    "max_batch": (int,),
    "comfortable_batch": (int,),
    "process_mib": (int, float, type(None)),
    "process_upper_mib": (int, float, type(None)),
    "headroom_mib": (int, float, type(None)),
    "calibrated": (bool,),
    "source": (str,),
}

Warn = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Store:
    """A folder of results."""

    folder: Path
    surroundings: str  # a digest of what decides the figures of all jobs
    warn: Warn

    def find(self, task: Task) -> Done:
        """The cells of the task that are there."""
        cells: dict[str, dict[str, Any]] = {}
        notes: dict[str, None] = {}
        unknown: dict[str, None] = {}
        wanted = {device_digest(device) for device in task.devices}
        for path in sorted(self.folder.glob(f"*-{self._key(task)}.*.json")):
            done = self._load(path)
            cells |= {digest: cell for digest, cell in done.cells.items() if digest in wanted}
            notes |= dict.fromkeys(done.notes)
            unknown |= dict.fromkeys(done.unknown_ops)
        return Done(cells, tuple(notes), tuple(unknown))

    def keep(self, task: Task, done: Done) -> None:
        """Write what a worker found. Raises DataFileError."""
        gpus = sha256(" ".join(sorted(done.cells)).encode()).hexdigest()[:8]
        readable = re.sub(r"[^a-z0-9]+", "-", f"{task.model} {task.recipe}".lower()).strip("-")[:60]
        said = {
            "schema": SCHEMA,
            "task": task_to_json(task),
            "notes": done.notes,
            "unknown_ops": done.unknown_ops,
            "cells": done.cells,
        }
        text = json.dumps(said, allow_nan=False)
        write_bytes(self.folder / f"{readable}-{self._key(task)}.{gpus}.json", f"{text}\n".encode())

    def _key(self, task: Task) -> str:
        said = task_to_json(task) | {"surroundings": self.surroundings, "code": _code_of(task)}
        return sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]

    def _load(self, path: Path) -> Done:
        try:
            return _read(path)
        except (OSError, ValueError, RecursionError) as error:
            problem = " ".join(str(error).split())[:200]
            self.warn(f"{path}: broken result: {problem}; its cells are computed anew")
            return Done({})


def open_store(folder: Path, calibrations: Iterable[Path], warn: Warn) -> Store:
    """The results of a folder, which is made. Raises DataFileError where it cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = error.strerror or error
        raise DataFileError(f"{folder}: cannot be made: {problem}; name another with --results") from error
    found = sha256()
    for path in _deciding(calibrations):
        found.update(f"{path.name}\n".encode())
        found.update(path.read_bytes())
    return Store(folder, found.hexdigest(), warn)


def _deciding(calibrations: Iterable[Path]) -> Iterator[Path]:
    """The planner's own code and the calibrations that may answer."""
    yield from sorted(_PACKAGE.rglob("*.py"))
    for folder in search_path(list(calibrations)):
        if folder.is_dir():
            yield from sorted(folder.glob("*.yaml"))


def _code_of(task: Task) -> Any:
    """What decides the job's traces, as far as anybody can know it."""
    key = key_of(replace(task.job, cudnn=""))
    if key is not None:
        return [key, _library_of(task.job)] if task.job.cudnn else key
    source, name = split_model(task.job.source or task.job.model)
    file = Path(name.rpartition(":")[0])
    content = file.read_bytes() if source == "file" and file.is_file() else b""
    return sha256(content).hexdigest()


def _library_of(job: Job) -> str:
    """Return what decides the answers of the cuDNN that the job asks; "" where there is none."""
    try:
        library = open_cudnn_with_cublaslt(job.cudnn)
    except UsageError:
        return ""
    return f"{library.version} without cuBLASLt" if library.lacks else library.version


def _read(path: Path) -> Done:
    with path.open("rb") as file:
        content = file.read(LARGEST_FILE_BYTES + 1)
    if len(content) > LARGEST_FILE_BYTES:
        raise ValueError(f"more than {LARGEST_FILE_BYTES} bytes")
    said = json.loads(content.decode(), parse_constant=_refuse_constant)
    if not isinstance(said, dict) or said.get("schema") != SCHEMA:
        raise ValueError(f"no result of schema {SCHEMA}")
    cells = said.get("cells")
    if not isinstance(cells, dict):
        raise ValueError("cells: no mapping")
    for digest, cell in cells.items():
        _check_cell(digest, cell)
    return Done(cells, _texts(said, "notes"), _texts(said, "unknown_ops"))


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is no finite number")


def _check_cell(digest: str, cell: object) -> None:
    if not isinstance(cell, dict):
        raise ValueError(f"cells.{digest}: no mapping")
    for name, kinds in _CELL.items():
        if type(cell.get(name)) not in kinds:
            raise ValueError(f"cells.{digest}.{name}: {str(cell.get(name))[:40]!r} makes no sense")


def _texts(said: dict[str, Any], name: str) -> tuple[str, ...]:
    texts = said.get(name)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{name}: a list of texts is wanted")
    return tuple(texts)
