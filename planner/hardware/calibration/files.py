"""Read and write calibration files.

A file is of one job, GPU, versions and settings. `docs/calibration.md` describes the layout. Reading is
strict: each error names the file, the line and the key. Job options that a file of an older version lacks
have their defaults, but `cudnn` is `published` in schema 1. A file is replaced atomically by a rename, under
a lock on its folder, so that any number of processes may add to it. A file that is broken or foreign is never
changed.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import asdict

from planner._support.atomic_write import write_bytes
from planner._support.conversion import Count, Text
from planner._support.strict_yaml import LARGEST_FILE_BYTES, Entry, read_entry
from planner.errors import DataFileError, UsageError
from planner.hardware.calibration.model import (
    Calibration,
    Fit,
    Key,
    NoFit,
    Observation,
    Origin,
    Point,
    Settings,
    Versions,
    includes_context,
    origin_of,
)
from planner.hardware.database import is_emulated
from planner.jobs import PUBLISHED, Job, job_from_json, job_to_json

SCHEMA = 2
_OLDEST_SCHEMA = 1  # in which a job without `cudnn` had the workspaces of published runs
TABLES_FOLDER = Path(__file__).resolve().parents[3] / "calibration" / "tables"  # shipped with the package
COMMUNITY = "community"  # the folder of the package's tables that users have contributed
LOCK = ".lock"
_STATEMENTS = ("source", "about", "when", "traced_with", "includes_context")
_OF_KEY = ("job", "gpu", "versions", "settings", "source")  # written once in a file, not for each point

S = TypeVar("S", bound=Struct)
Fitter = Callable[[Sequence[Point]], Fit | NoFit]


class Origins(Struct, frozen=True):
    """The source and the remark of a calibration file, and the version of torch that traced the replays."""

    source: Origin
    about: str
    traced_with: str


class _Settings(Settings, frozen=True, forbid_unknown_fields=True):
    cudnn_benchmark: bool = False  # a setting until it became part of the job


class _Point(Observation, frozen=True, kw_only=True, forbid_unknown_fields=True):
    replayed_bytes: Count


class _CalibrationFile(Struct, frozen=True, forbid_unknown_fields=True):
    schema: int
    kind: str
    gpu: Text
    source: Origin
    about: str
    when: Text
    traced_with: Text
    includes_context: bool
    job: dict[str, Any]
    versions: Versions
    settings: _Settings
    fit: dict[str, Any]
    points: Annotated[list[Any], Meta(min_length=1)]


def load_folders(folders: Iterable[Path]) -> tuple[Calibration, ...]:
    """Read all calibrations in the folders, in the order of `folders`; skip missing folders."""
    paths = [path for folder in folders if folder.is_dir() for path in sorted(folder.glob("*.yaml"))]
    return tuple(map(load_calibration, paths))


def load_calibration(path: Path) -> Calibration:
    """Read the calibration in a YAML file. Raises DataFileError for an invalid file or an unknown schema."""
    return _calibration(read_entry(path))


def search_path(first: Sequence[Path]) -> tuple[Path, ...]:
    """Return the folders to search for calibrations: the given folders, then the package's tables.

    The tables that users have contributed come last. Raises UsageError if a given folder does not exist.
    """
    contributed = TABLES_FOLDER / COMMUNITY
    return (*check_folders(first), TABLES_FOLDER, *([contributed] if contributed.is_dir() else []))


def check_folders(folders: Sequence[Path]) -> Sequence[Path]:
    """Check that the folders exist, and return them. Raises UsageError for a missing folder."""
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"--calibrations {folder}: no such folder; make it or remove the option")
    return folders


def file_name(key: Key) -> str:
    """Return the file name for a key: the GPU, model and optimizer, then a digest of the key."""
    document = json.dumps(_key_to_json(key), sort_keys=True)
    model = key.job.model.origin
    readable = re.sub(r"[^a-z0-9]+", "-", f"{key.gpu} {model} {key.job.loop.optimizer}".lower()).strip("-")
    return f"{readable[:80]}-{sha256(document.encode()).hexdigest()[:12]}.yaml"


def add_points(folder: Path, key: Key, points: Sequence[Point], origins: Origins, fit: Fitter) -> Calibration:
    """Add runs to the calibration file of their key, and return the refitted calibration.

    A run that the file has already, equal in all fields, is not added again, but its replayed peak is
    replaced. Raises ValueError for points of another key or origin, and DataFileError if the file cannot be
    written, is broken or foreign; in these cases the file is not changed.
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
        by_run = {point.observation: point for point in (*before, *points)}
        merged = tuple(sorted(by_run.values(), key=_order))
        calibration = Calibration(
            key=key,
            source=origins.source,
            about=origins.about,
            when=max(point.observation.when for point in merged),
            traced_with=origins.traced_with,
            includes_context=includes_context(merged),
            points=merged,
            fit=fit(merged),
        )
        write_calibration(path, calibration)
    return calibration


def key_of(observation: Observation) -> Key:
    """Return the calibration key of a run: its job, GPU, versions and settings."""
    return Key(observation.job, observation.gpu, observation.versions, observation.settings)


def _calibration(entry: Entry) -> Calibration:
    parts = entry.mapping()
    if "schema" not in parts or "kind" not in parts or not parts["kind"].is_word("calibration"):
        raise entry.broken("no calibration: expected `kind: calibration` and a schema")
    schema = parts["schema"].convert(int)
    if schema > SCHEMA:
        raise parts["schema"].broken(
            f"schema {schema} is newer than {SCHEMA}, the newest known: update the planner"
        )
    if schema < _OLDEST_SCHEMA:
        raise parts["schema"].broken(f"unsupported schema {schema}; this version reads 1 and {SCHEMA}")
    entry.children(_CalibrationFile.__struct_fields__)
    record = entry.convert(_CalibrationFile)
    if (record.source == "emulated") != is_emulated(record.gpu):
        raise parts["source"].broken(f"figures of {record.gpu} are {origin_of(record.gpu)}")
    job = _job(parts["job"], record.job, record.settings.cudnn_benchmark)
    if schema == _OLDEST_SCHEMA and not job.environment.cudnn:
        job = job.replace(cudnn=PUBLISHED)
    key = Key(job, record.gpu, record.versions, _fields(Settings, record.settings))
    items = parts["points"].items()
    points = [item.convert(_Point, **asdict(key), source=record.source) for item in items]
    return Calibration(
        key=key,
        **{name: getattr(record, name) for name in _STATEMENTS},
        points=tuple(Point(_fields(Observation, point), point.replayed_bytes) for point in points),
        fit=parts["fit"].convert(NoFit) if "refused" in record.fit else parts["fit"].convert(Fit),
    )


def _fields(kind: type[S], record: S) -> S:
    """Return an instance of `kind` with fields copied from a record."""
    return kind(**{name: getattr(record, name) for name in kind.__struct_fields__})


def _job(entry: Entry, options: dict[str, Any], benchmark: bool) -> Job:
    defaults = job_to_json(Job.create(model=""))
    unknown = options.keys() - defaults.keys()
    if unknown:
        raise entry.broken(f"a job has no {min(unknown)!r}; the file may come from a newer planner")
    try:
        job = job_from_json(defaults | options)
    except (UsageError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise entry.broken(f"no job: {str(error)[:200]}") from error
    if not job.model.name:
        raise entry.broken("missing model")
    return job.replace(cudnn_benchmark=True) if benchmark else job


def _order(point: Point) -> tuple[int, str, str]:
    return point.observation.batch, point.observation.when, repr(point)


def _load_own(path: Path, key: Key) -> Calibration | None:
    """Read the calibration in the file of a key, or return None if there is no file.

    Raises DataFileError if the file is of another key.
    """
    if not path.exists() and not path.is_symlink():
        return None
    stored = load_calibration(path)
    if stored.key != key:
        raise DataFileError(f"{path}: holds another job, GPU or versions than its name; move it away")
    return stored


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Write a calibration to a YAML file. Raises DataFileError if it is too large or cannot be written."""
    text = calibration_text(calibration)
    if len(text.encode()) > LARGEST_FILE_BYTES:
        raise DataFileError(f"{path}: full; move it away to begin a new one")
    write_bytes(path, text.encode())


def calibration_text(calibration: Calibration) -> str:
    """Return a calibration as the YAML text of its file."""
    import yaml

    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
    text: str = yaml.dump(_to_json(calibration), Dumper=dumper, sort_keys=False, width=100)
    return text


def _to_json(calibration: Calibration) -> dict[str, Any]:
    key = _key_to_json(calibration.key)
    return {
        "schema": SCHEMA,
        "kind": "calibration",
        "gpu": key["gpu"],
        **{name: getattr(calibration, name) for name in _STATEMENTS},
        "job": key["job"],
        "versions": key["versions"],
        "settings": key["settings"],
        "fit": msgspec.to_builtins(calibration.fit),
        "points": [_point_to_json(point) for point in calibration.points],
    }


def _key_to_json(key: Key) -> dict[str, Any]:
    document: dict[str, Any] = msgspec.to_builtins(asdict(key) | {"job": job_to_json(key.job)})
    return document


def _point_to_json(point: Point) -> dict[str, Any]:
    run = asdict(point.observation)
    return {"replayed_bytes": point.replayed_bytes} | {name: run[name] for name in run if name not in _OF_KEY}


def _locked(folder: Path) -> AbstractContextManager[Any]:
    """Create a folder, lock it against other processes, and return a context manager that unlocks it.

    Raises DataFileError if the folder cannot be written.
    """
    from filelock import FileLock

    try:
        folder.mkdir(parents=True, exist_ok=True)
        return FileLock(folder / LOCK).acquire()
    except OSError as error:
        raise DataFileError(f"{folder}: cannot be written: {error.strerror or error}") from error
