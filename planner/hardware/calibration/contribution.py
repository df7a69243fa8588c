"""Prepare calibrations for contribution by users, and check contributed files.

Private data is removed. A contributed file has the format of a calibration with `source: contributed`. It
names versions, GPU, job and peaks. It has no code, paths, hosts, users or serial numbers: a model from a
file, or of a guarded training, is replaced by a digest.
"""

import re
from collections.abc import Callable, Iterator
from datetime import date
from hashlib import sha256
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from planner.errors import DataFileError, UsageError
from planner.hardware.calibration.files import file_name, load_calibration
from planner.hardware.calibration.lookup import is_same_gpu
from planner.hardware.calibration.model import Calibration, Observation, Point, Versions
from planner.hardware.database import is_emulated, load_devices
from planner.hardware.device import MIB
from planner.jobs import Job, job_to_json

AFFINE_SHARE = 0.2  # workspaces of cuDNN come and go: they lift the peak of some runs by a fifth
_LIBRARIES = "torchvision|timm|hf|diffusers|monai|smp|zoo"
_PUBLIC = re.compile(rf"({_LIBRARIES}):[\w.-]+|[\w.-]+|(file|module):[0-9a-f]{{16}}")
_PRIVATE = re.compile(r"[/\\@~]|\.py\b|GPU-[0-9a-f]{8}", re.IGNORECASE)
_VERSIONS = {
    "torch": re.compile(r"[12]\.\d{1,2}(\.\d{1,2})?([ab]\d|rc\d|\.dev\d{8})?(\+cu\d{2,3})?"),
    "cuda": re.compile(r"1[0-9]\.\d"),
    "cudnn": re.compile(r"[789]\.\d{1,2}(\.\d{1,2})?"),
    "driver": re.compile(r"[3-9]\d\d\.\d{1,3}(\.\d{1,3})?"),
}


def pack(calibration: Calibration, read: Callable[[Path], bytes] = Path.read_bytes) -> Calibration:
    """Convert a calibration to the form for contributions, without private data.

    Raises UsageError if it may not be contributed.
    """
    key = calibration.key
    if calibration.source != "measured" or is_emulated(key.gpu):
        raise UsageError(f"{calibration.describe()}: only what was measured on a real GPU is contributed")
    job = _public_job(key.job, read).replace(cudnn=key.job.environment.cudnn)
    points = tuple(
        Point(replace(one.observation, job=job, about="", source="contributed"), one.replayed_bytes)
        for one in calibration.points
    )
    packed = replace(
        calibration, key=replace(key, job=job), source="contributed", about="contributed", points=points
    )
    for problem in (*_private(job), *_implausible(packed)):
        raise UsageError(f"{calibration.describe()}: {problem}; it cannot be contributed")
    return packed


def check_contribution(path: Path) -> list[str]:
    """Return the problems of a contributed file, one line each.

    The file may be merged if there are none. The file is read strictly: an error of its format names line and
    key.
    """
    try:
        calibration = load_calibration(path)
    except DataFileError as error:
        return [str(error)]
    problems = [*_private(calibration.key.job), *_implausible(calibration)]
    if calibration.source != "contributed":
        problems.insert(0, f"source: {calibration.source}; a contributed file has source: contributed")
    if calibration.about != "contributed" or any(point.observation.about for point in calibration.points):
        problems.append("about: remarks are left out; it reads: contributed")
    if path.name != file_name(calibration.key):
        problems.append(f"the file's name belongs to another key; expected {file_name(calibration.key)}")
    return [f"{path}: {problem}" for problem in problems]


def _public_job(job: Job, read: Callable[[Path], bytes]) -> Job:
    """Return the job, with the name of a private model, such as a user's file, replaced by a digest."""
    structure = dict(job.model.args).get("structure")
    name = job.model.origin
    if structure is not None and len(job.model.args) == 1:
        return job.replace(model=f"module:{structure}", source="", model_args=())
    file, _, member = name.rpartition(":")
    if not file.endswith(".py") and not _PRIVATE.search(name):
        return job
    try:
        content = read(Path(file))
    except OSError:  # the file is gone: its name is digested instead of its content
        content = file.encode()
    digest = sha256(content + member.encode()).hexdigest()[:16]
    return job.replace(model=f"file:{digest}", source="")


def _private(job: Job) -> Iterator[str]:
    """Yield a problem for each field of a job that may name a file, a person or a machine."""
    if not _PUBLIC.fullmatch(job.model.origin):
        yield f"job.model: {job.model.origin!r} is no public name and no digest"
    values: dict[str, Any] = job_to_json(job)
    for name, value in values.items():
        if any(_PRIVATE.search(text) for text in _texts(value)):
            yield f"job.{name}: names a file, a person or a machine"


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _texts(one)
    elif isinstance(value, dict):
        for key, one in value.items():
            yield str(key)
            yield from _texts(one)


def _implausible(calibration: Calibration) -> Iterator[str]:
    """Yield a problem, in one line, for each implausible figure of a calibration."""
    key, runs = calibration.key, [point.observation for point in calibration.points]
    devices = [device for device in load_devices() if is_same_gpu(device, key.gpu, key.versions)]
    if not devices:
        yield f"gpu: {key.gpu!r} with this memory is not in the database"
    elif devices[0].capability != key.versions.capability:
        yield f"versions.capability: {devices[0].name} has {'.'.join(map(str, devices[0].capability))}"
    yield from _unknown_versions(key.versions)
    for number, run in enumerate(runs):
        yield from (f"points[{number}].{problem}" for problem in _of_run(run, key.versions))
    yield from _not_affine(runs)


def _unknown_versions(versions: Versions) -> Iterator[str]:
    for name, known in _VERSIONS.items():
        text = getattr(versions, name)
        if text is None:
            if name in ("torch", "cuda"):
                yield f"versions.{name}: missing"
        elif not known.fullmatch(text):
            yield f"versions.{name}: {text!r} is no known version"


def _of_run(run: Observation, versions: Versions) -> Iterator[str]:
    allocated, reserved, process = run.peak_allocated_bytes, run.peak_reserved_bytes, run.process_peak_bytes
    total = versions.nvml_total_bytes or versions.torch_total_bytes
    if allocated is None or reserved is None:
        yield "peak_allocated_bytes: both peaks of torch are needed"
        return
    if reserved < allocated:
        yield "peak_reserved_bytes: less than is allocated"
    if reserved % (2 * MIB):
        yield "peak_reserved_bytes: torch reserves whole multiples of 2 MiB"
    if process is not None and process < reserved and not run.retries:
        yield "process_peak_bytes: less than torch has reserved"
    if total is not None and max(reserved, process or 0) > total:
        yield "process_peak_bytes: more than the GPU has"
    try:
        is_known = date(2017, 1, 1) <= date.fromisoformat(run.when) <= date.today()
    except ValueError:
        is_known = False
    if not is_known:
        yield f"when: {run.when!r} is no day until today"


def _not_affine(runs: list[Observation]) -> Iterator[str]:
    """Yield a problem for each allocated peak far from the line through the smallest and largest batch.

    Another problem is a peak that falls from the smallest to the largest batch. Fewer than three batch sizes
    have no problems.
    """
    peaks = {run.batch: run.peak_allocated_bytes for run in runs if run.is_unconstrained}
    known = {batch: peak for batch, peak in peaks.items() if peak is not None}
    if len(known) < 3:
        return
    first, last = min(known), max(known)
    slope = (known[last] - known[first]) / (last - first)
    if slope < 0:
        yield f"points: the peak falls from batch {first} to {last}"
    for batch, peak in known.items():
        line = known[first] + slope * (batch - first)
        if abs(peak - line) > AFFINE_SHARE * max(peak, line):
            yield f"points: batch {batch} is far from the line through batches {first} and {last}"
