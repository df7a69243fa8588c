"""Calibrations as files: one per job, GPU, versions and settings; what is written is read back first.

A file is replaced whole by a rename, under a lock on its folder, so that any number of processes may add to
it. A file that is broken or belongs to something else is never touched.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

from planner._support.atomic_write import write_bytes
from planner.errors import DataFileError
from planner.hardware.calibration import (
    LARGEST_FILE_BYTES,
    SCHEMA,
    Calibration,
    Fit,
    Key,
    Observation,
    Origin,
    Point,
    Refusal,
    is_whole,
    load_calibration,
)
from planner.jobs import job_to_json

LOCK = ".lock"
_OF_KEY = ("job", "gpu", "versions", "settings", "source")  # said once in a file, not at each point

Fitter = Callable[[Sequence[Point]], Fit | Refusal]


@dataclass(frozen=True, slots=True)
class Origins:
    """What a file says of its figures besides the figures."""

    source: Origin
    about: str
    traced_with: str


def file_name(key: Key) -> str:
    """Readable in front, different for different keys by its end."""
    said = json.dumps(_key_to_json(key), sort_keys=True)
    model = key.job.source or key.job.model
    readable = re.sub(r"[^a-z0-9]+", "-", f"{key.gpu} {model} {key.job.optimizer}".lower()).strip("-")
    return f"{readable[:80]}-{sha256(said.encode()).hexdigest()[:12]}.yaml"


def add_points(folder: Path, key: Key, points: Sequence[Point], origins: Origins, fit: Fitter) -> Calibration:
    """Put runs into the file of their key, fit all that it then holds, and write it; returns what it says.

    A run that is there already, to the last field, is not added again, but its replayed peak is taken
    anew. Raises ValueError for points of another key or origin, DataFileError where the file cannot be
    written or is broken or foreign; it is left as it is then.
    """
    for point in points:
        if key_of(point.observation) != key:
            raise ValueError(f"batch {point.observation.batch} was run for another key")
        if point.observation.source != origins.source:
            raise ValueError(f"batch {point.observation.batch} is {point.observation.source}")
    path = folder / file_name(key)
    with _locked(folder):
        stored = _load_own(path, key)
        if stored is not None and stored.source != origins.source:
            raise DataFileError(
                f"{path}: its figures are {stored.source}, these {origins.source}; take another folder"
            )
        before = stored.points if stored is not None else ()
        replayed = {point.observation: point for point in (*before, *points)}
        merged = tuple(sorted(replayed.values(), key=_order))
        found = Calibration(
            key=key,
            source=origins.source,
            about=origins.about,
            when=max(point.observation.when for point in merged),
            traced_with=origins.traced_with,
            includes_context=_with_context(merged),
            points=merged,
            fit=fit(merged),
        )
        _write(path, found)
    return found


def save_calibration(folder: Path, calibration: Calibration) -> Path:
    """Write the file of a calibration in place of an earlier one of the same key; raises as `add_points`."""
    path = folder / file_name(calibration.key)
    with _locked(folder):
        _load_own(path, calibration.key)
        _write(path, calibration)
    return path


def key_of(observation: Observation) -> Key:
    """What the runs of one file share."""
    return Key(observation.job, observation.gpu, observation.versions, observation.settings)


def _with_context(points: Sequence[Point]) -> bool:
    from planner.hardware.calibration import includes_context

    return includes_context([point for point in points if is_whole(point.observation)])


def _order(point: Point) -> tuple[int, str, str]:
    return point.observation.batch, point.observation.when, repr(point)


def _load_own(path: Path, key: Key) -> Calibration | None:
    """What the file holds now; None where there is none."""
    if not path.exists() and not path.is_symlink():
        return None
    stored = load_calibration(path)
    if stored.key != key:
        raise DataFileError(f"{path}: holds another job, GPU or versions than its name says; move it away")
    return stored


def _write(path: Path, calibration: Calibration) -> None:
    import yaml

    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    plain = json.loads(json.dumps(_to_json(calibration)))  # YAML knows neither enumerations nor tuples
    text = yaml.dump(plain, Dumper=dumper, sort_keys=False, width=100)
    if len(text.encode()) > LARGEST_FILE_BYTES:
        raise DataFileError(f"{path}: full; move it away to begin a new one")
    write_bytes(path, text.encode())


def _to_json(calibration: Calibration) -> dict[str, Any]:
    key = _key_to_json(calibration.key)
    fit = calibration.fit
    return {
        "schema": SCHEMA,
        "kind": "calibration",
        "gpu": key["gpu"],
        "source": calibration.source,
        "about": calibration.about,
        "when": calibration.when,
        "traced_with": calibration.traced_with,
        "includes_context": calibration.includes_context,
        "job": key["job"],
        "versions": key["versions"],
        "settings": key["settings"],
        "fit": {"refused": fit.reason}
        if isinstance(fit, Refusal)
        else asdict(fit) | {"outliers": list(fit.outliers)},
        "points": [_point_to_json(point) for point in calibration.points],
    }


def _key_to_json(key: Key) -> dict[str, Any]:
    return {
        "job": job_to_json(key.job),
        "gpu": key.gpu,
        "versions": asdict(key.versions) | {"capability": list(key.versions.capability)},
        "settings": asdict(key.settings),
    }


def _point_to_json(point: Point) -> dict[str, Any]:
    observation = point.observation
    names = [field.name for field in fields(Observation) if field.name not in _OF_KEY]
    return {"replayed_bytes": point.replayed_bytes} | {name: getattr(observation, name) for name in names}


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """No other process is in here at the same time; the lock dies with its process."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a+b")
    except OSError as error:
        raise DataFileError(f"{folder}: cannot be written: {error.strerror or error}") from error
    with file:
        if sys.platform == "win32":
            import msvcrt

            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield
