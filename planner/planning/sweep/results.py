"""Store the results of sweeps in a folder, with one file for each job and set of GPUs.

A file is complete or absent. Its name ends in two digests: of everything that decides its figures (job,
memory, versions, the planner's own code, calibrations), and of the GPUs in it. So no two runs write different
content under one name, and any number of sweeps may share a folder. A broken or foreign file is reported, and
its cells are computed again.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from planner._support.atomic_write import write_bytes
from planner._support.bounded_read import LARGEST_CODE_BYTES, read_bytes
from planner.emulator import open_convolutions
from planner.errors import DataFileError, UsageError
from planner.hardware.calibration import search_path
from planner.jobs import Job, split_model
from planner.planning.sweep.task import GpuFigures, Task, TaskResult, device_digest, task_to_json
from planner.store import fingerprint_of

LARGEST_FILE_BYTES = 2**24  # a cell takes about 600 bytes
_PACKAGE = Path(__file__).parents[2]

Warn = Callable[[str], None]


class _ResultFile(msgspec.Struct):
    schema: Literal[1]
    notes: tuple[str, ...]
    unknown_ops: tuple[str, ...]
    cells: dict[str, GpuFigures]
    task: Any = None


class ResultStore(Struct, frozen=True):
    """A folder of stored sweep results."""

    folder: Path
    environment_digest: str  # digest of the files that decide the figures of all jobs
    warn: Warn

    def find(self, task: Task) -> TaskResult:
        """Return the stored results of a task, merged from all its files.

        The result has no cells for GPUs without a stored result.
        """
        cells: dict[str, GpuFigures] = {}
        notes: dict[str, None] = {}
        unknown: dict[str, None] = {}
        digests = {device_digest(device) for device in task.devices}
        for path in sorted(self.folder.glob(f"*-{self._key(task)}.*.json")):
            stored = self._load(path)
            cells |= {digest: cell for digest, cell in stored.cells.items() if digest in digests}
            notes |= dict.fromkeys(stored.notes)
            unknown |= dict.fromkeys(stored.unknown_ops)
        return TaskResult(cells, tuple(notes), tuple(unknown))

    def keep(self, task: Task, result: TaskResult) -> None:
        """Write a task's result to a file of the folder. Raises DataFileError if that fails."""
        gpus = sha256(" ".join(sorted(result.cells)).encode()).hexdigest()[:8]
        readable = re.sub(r"[^a-z0-9]+", "-", f"{task.model} {task.recipe}".lower()).strip("-")[:60]
        content = _ResultFile(1, result.notes, result.unknown_ops, dict(result.cells), task_to_json(task))
        path = self.folder / f"{readable}-{self._key(task)}.{gpus}.json"
        write_bytes(path, msgspec.json.encode(content) + b"\n")

    def _key(self, task: Task) -> str:
        decisive = task_to_json(task) | {"surroundings": self.environment_digest, "code": _code_of(task)}
        return sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]

    def _load(self, path: Path) -> TaskResult:
        try:
            stored = msgspec.json.decode(read_bytes(path, LARGEST_FILE_BYTES), type=_ResultFile)
        except (OSError, ValueError, RecursionError) as error:
            problem = " ".join(str(error).split())[:200]
            self.warn(f"{path}: broken result: {problem}; its cells are computed again")
            return TaskResult()
        return TaskResult(stored.cells, stored.notes, stored.unknown_ops)


def open_results(folder: Path, calibrations: Iterable[Path], warn: Warn) -> ResultStore:
    """Open a folder of results, creating it if it is missing. Raises DataFileError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = error.strerror or error
        raise DataFileError(f"{folder}: cannot be made: {problem}; name another with --results") from error
    digest = sha256()
    for path in _deciding_files(calibrations):
        digest.update(f"{path.name}\n".encode())
        digest.update(read_bytes(path, LARGEST_CODE_BYTES))
    return ResultStore(folder, digest.hexdigest(), warn)


def _deciding_files(calibrations: Iterable[Path]) -> Iterator[Path]:
    """Yield the planner's source files and all calibration files on the search path."""
    yield from sorted(_PACKAGE.rglob("*.py"))
    for folder in search_path(list(calibrations)):
        if folder.is_dir():
            yield from sorted(folder.glob("*.yaml"))


def _code_of(task: Task) -> Any:
    """Return a JSON value that changes with the code or data behind a job's traces.

    It is the job's fingerprint and the source of its convolution workspaces. If the job has no fingerprint,
    it is a digest of the model's file.
    """
    key = fingerprint_of(task.job)
    if key is not None:
        return [key, _library_of(task.job)]
    source, name = split_model(task.job.model.origin)
    file = Path(name.rpartition(":")[0])
    content = read_bytes(file, LARGEST_CODE_BYTES) if source == "file" and file.is_file() else b""
    return sha256(content).hexdigest()


def _library_of(job: Job) -> str:
    """Return the name of the source of a job's convolution workspaces, or "" if none can be opened."""
    try:
        return open_convolutions(job).name
    except UsageError:
        return ""
