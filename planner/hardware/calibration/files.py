"""The strict reader of calibration files: each error names the file, the line and the key.

The layout is what `calibration/record.py` writes; `docs/calibration.md` describes it. A file of an older
version lacks the options that jobs had not got then, and stands for their defaults.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

from planner._support.strict_yaml import Entry, read_entry
from planner.errors import DataFileError, UsageError
from planner.hardware.calibration.model import Calibration, Fit, Key, Point, Refusal
from planner.hardware.calibration.observation import Observation, Origin, Settings, Versions, origin_of
from planner.hardware.database import is_emulated
from planner.jobs import Job, job_from_json, job_to_json

SCHEMA = 1
TABLES_FOLDER = Path(__file__).resolve().parents[3] / "calibration" / "tables"  # ship with the package
LARGEST_FILE_BYTES = 4 * 2**20  # a point takes 600
LARGEST_BYTES = 2**50
DEEPEST = 8  # nested lists in a model's arguments

_TOP = (
    *("schema", "kind", "gpu", "source", "about", "when", "traced_with", "includes_context", "job"),
    *("versions", "settings", "fit", "points"),
)
_POINT_SIZES = (
    *("peak_allocated_bytes", "peak_reserved_bytes", "end_allocated_bytes", "process_peak_bytes"),
    *("process_rise_bytes", "context_before_bytes", "context_after_bytes"),
)
_POINT = ("batch", "replayed_bytes", *_POINT_SIZES, "retries", "oom", "about", "when")
_FIT = (
    *("overhead_bytes", "slope", "spread_bytes", "points", "center_bytes", "width_bytes"),
    *("highest_leverage", "outliers"),
)

_MOVED_TO_JOB = "cudnn_benchmark"  # stood under the settings until it became part of the job

T = TypeVar("T")


def load_folders(folders: Iterable[Path]) -> tuple[Calibration, ...]:
    """All calibrations of these folders, in this order; a folder that is not there holds none."""
    paths = [path for folder in folders if folder.is_dir() for path in sorted(folder.glob("*.yaml"))]
    return tuple(map(load_calibration, paths))


def load_calibration(path: Path) -> Calibration:
    """Read one file.

    Raises DataFileError for a file that cannot be read and for what is no calibration of this schema.
    """
    try:
        if path.stat().st_size > LARGEST_FILE_BYTES:
            raise DataFileError(f"{path}: more than {LARGEST_FILE_BYTES} bytes are no calibration")
        return _calibration(read_entry(path))
    except OSError as error:
        raise DataFileError(f"{path}: not readable ({error.strerror or error})") from error
    except RecursionError:
        raise DataFileError(f"{path}: nested too deeply to be a calibration") from None


def _calibration(entry: Entry) -> Calibration:
    top = entry.mapping()
    if "schema" not in top or "kind" not in top or not top["kind"].says("calibration"):
        raise entry.broken("no calibration: it has to say `kind: calibration` and its schema")
    schema = _whole(top["schema"], 0)
    if schema > SCHEMA:
        raise top["schema"].broken(
            f"schema {schema} is newer than {SCHEMA}, the newest known: update the planner"
        )
    if schema < SCHEMA:
        raise top["schema"].broken(f"there never was a schema {schema}")
    entry.children(_TOP)
    source = cast(Origin, top["source"].choice(get_args(Origin)))
    if (source == "emulated") != is_emulated(top["gpu"].text()):
        raise top["source"].broken(f"figures of {top['gpu'].text()} are {origin_of(top['gpu'].text())}")
    settings = top["settings"]
    job = _job(top["job"])
    if _was_benchmarked(settings):
        job = replace(job, cudnn_benchmark=True)
    key = Key(job, top["gpu"].text(), _versions(top["versions"]), _settings(settings))
    points = tuple(_point(item, key, source) for item in top["points"].items())
    if not points:
        raise top["points"].broken("a calibration without a run does not exist")
    return Calibration(
        key=key,
        source=source,
        about=_line(top["about"]),
        when=top["when"].text(),
        traced_with=top["traced_with"].text(),
        includes_context=_flag(top["includes_context"]),
        points=points,
        fit=_fit(top["fit"]),
    )


def _point(entry: Entry, key: Key, source: Origin) -> Point:
    parts = entry.children(_POINT)
    observation = Observation(
        job=key.job,
        batch=_whole(parts["batch"], 1),
        gpu=key.gpu,
        versions=key.versions,
        settings=key.settings,
        **{name: _whole_or_none(parts[name]) for name in _POINT_SIZES},
        retries=_whole_or_none(parts["retries"]),
        oom=_flag(parts["oom"]),
        source=source,
        about=_line(parts["about"]),
        when=parts["when"].text(),
    )
    return Point(observation, _whole(parts["replayed_bytes"], 0))


def _fit(entry: Entry) -> Fit | Refusal:
    if "refused" in entry.mapping():
        return Refusal(entry.children(("refused",))["refused"].text())
    parts = entry.children(_FIT)
    return Fit(
        overhead_bytes=_whole(parts["overhead_bytes"], -LARGEST_BYTES),
        slope=parts["slope"].number(0.01, 100),
        spread_bytes=_whole(parts["spread_bytes"], 0),
        points=_whole(parts["points"], 3),
        center_bytes=_whole(parts["center_bytes"], 0),
        width_bytes=_whole(parts["width_bytes"], 1),
        highest_leverage=parts["highest_leverage"].number(0, 1),
        outliers=tuple(_whole(item, 1) for item in parts["outliers"].items()),
    )


def _versions(entry: Entry) -> Versions:
    parts = entry.children(
        ("torch", "cuda", "cudnn", "driver", "capability", "torch_total_bytes", "nvml_total_bytes")
    )
    capability = [_whole(item, 0, 99) for item in parts["capability"].items()]
    if len(capability) != 2:
        raise parts["capability"].broken("two whole numbers are wanted, such as [8, 6]")
    return Versions(
        torch=parts["torch"].text(),
        cuda=_text_or_none(parts["cuda"]),
        cudnn=_text_or_none(parts["cudnn"]),
        driver=_text_or_none(parts["driver"]),
        capability=(capability[0], capability[1]),
        torch_total_bytes=_whole_or_none(parts["torch_total_bytes"]),
        nvml_total_bytes=_whole_or_none(parts["nvml_total_bytes"]),
    )


def _was_benchmarked(settings: Entry) -> bool:
    """Whether the settings of a file of the first days say so."""
    said = settings.mapping().get(_MOVED_TO_JOB)
    return said is not None and _flag(said)


def _settings(entry: Entry) -> Settings:
    names = ("matmul_tf32", "cudnn_tf32", "alloc_conf", "allocator_cap_bytes")
    parts = entry.children(names, (_MOVED_TO_JOB,))
    return Settings(
        matmul_tf32=_flag(parts["matmul_tf32"]),
        cudnn_tf32=_flag(parts["cudnn_tf32"]),
        alloc_conf=_line(parts["alloc_conf"]),
        allocator_cap_bytes=_whole_or_none(parts["allocator_cap_bytes"]),
    )


def _job(entry: Entry) -> Job:
    said = {key: _plain(value) for key, value in entry.mapping().items()}
    defaults = job_to_json(Job(model=""))
    unknown = said.keys() - defaults.keys()
    if unknown:
        raise entry.broken(f"a job has no {min(unknown)!r}; the file may come from a newer planner")
    try:
        job = job_from_json(defaults | said)
    except (UsageError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise entry.broken(f"no job: {str(error)[:200]}") from error
    if not job.model:
        raise entry.broken("missing model")
    return job


def _plain(entry: Entry, depth: int = 0) -> Any:
    """A value as YAML's basic types."""
    tag = entry.node.tag.rpartition(":")[2]
    if depth > DEEPEST:
        raise entry.broken(f"nested more than {DEEPEST} deep")
    if tag == "seq":
        return [_plain(item, depth + 1) for item in entry.items()]
    if tag == "map":
        return {key: _plain(value, depth + 1) for key, value in entry.mapping().items()}
    if tag == "null":
        return None
    if tag == "bool":
        return _flag(entry)
    if tag == "str":
        return str(entry.node.value)
    number = entry.number(-LARGEST_BYTES, LARGEST_BYTES)
    return int(number) if tag == "int" else number


def _whole(entry: Entry, low: int, high: int = LARGEST_BYTES) -> int:
    number = entry.number(low, high)
    if not entry.node.tag.endswith(":int"):
        raise entry.broken("a whole number is wanted")
    return int(number)


def _whole_or_none(entry: Entry) -> int | None:
    return None if _is_null(entry) else _whole(entry, 0)


def _text_or_none(entry: Entry) -> str | None:
    return None if _is_null(entry) else entry.text()


def _is_null(entry: Entry) -> bool:
    return bool(entry.node.tag.endswith(":null"))


def _flag(entry: Entry) -> bool:
    if not (entry.says("true") or entry.says("false")):
        raise entry.broken("true or false is wanted")
    return entry.says("true")


def _line(entry: Entry) -> str:
    """A text that may be empty."""
    if not entry.node.tag.endswith(":str"):
        raise entry.broken("a text is wanted")
    return str(entry.node.value)


def search_path(first: Sequence[Path]) -> tuple[Path, ...]:
    """Where calibrations are looked for: the folders that were given, then the tables of the package.

    Raises UsageError for a given folder that is no folder.
    """
    return (*check_folders(first), TABLES_FOLDER)


def check_folders(folders: Sequence[Path]) -> Sequence[Path]:
    """Return the folders. Raises UsageError for one that is none."""
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"--calibrations {folder}: no such folder; make it or leave the option away")
    return folders
