"""Made-up runs and calibrations for the tests of calibration."""

from collections.abc import Sequence
from pathlib import Path

from planner.hardware.calibration.files import file_name, write_calibration
from planner.hardware.calibration.model import (
    Calibration,
    Fit,
    Key,
    NoFit,
    Observation,
    Point,
    Settings,
    Versions,
)
from planner.hardware.device import MIB, Device, SourcedBytes
from planner.jobs import Job, TensorSpec
from tests.helpers.runs import RUN
from tests.helpers.structs import replace

JOB = Job.create(
    "toy",
    source="torchvision:resnet18",
    model_args=(("depth", (1, 2)), ("rate", 0.5), ("bias", True)),
    inputs=(TensorSpec((3, 8, 8)),),
    target=TensorSpec((), "int64"),
)
VERSIONS = Versions("2.6.0+cu124", "12.4", "9.1.0", None, (8, 6), 11_900 * MIB, 12_288 * MIB)
KEY = Key(JOB, "NVIDIA GeForce RTX 3060", VERSIONS, Settings())
CARD = Device(
    name="RTX 3060 12GB",
    total=SourcedBytes(12_288 * MIB, "made up"),
    usable=SourcedBytes(11_900 * MIB, "made up"),
    context=SourcedBytes(400 * MIB, "made up", 40 * MIB),
    capability=(8, 6),
    aliases=("RTX 3060",),
    capability_source="NVIDIA's table",
)
FIT = Fit(500 * MIB, 1.02, 10 * MIB, 5, 3_000 * MIB, 2_000 * MIB, 0.6, (16,))
REFUSAL = NoFit("3 batch sizes")


def observation(batch: int, peak_mib: float, key: Key = KEY) -> Observation:
    """A run whose process peaked at this; its context took 300 MiB at first and 350 in the end."""
    return replace(
        RUN,
        job=key.job,
        batch=batch,
        gpu=key.gpu,
        versions=key.versions,
        settings=key.settings,
        peak_allocated_bytes=None,
        peak_reserved_bytes=round(peak_mib * MIB) - 350 * MIB,
        end_allocated_bytes=7,
        process_peak_bytes=round(peak_mib * MIB),
        context_after_bytes=350 * MIB,
        when="2026-01-02",
    )


def points(replayed: Sequence[float], measured: Sequence[float]) -> list[Point]:
    """Runs at batches 10, 20, ... with these replayed and measured peaks in MiB."""
    return [
        Point(observation(10 * number, y), round(x * MIB))
        for number, (x, y) in enumerate(zip(replayed, measured, strict=True), 1)
    ]


def save_calibration(folder: Path, stored: Calibration) -> Path:
    """Write the file of a calibration into a folder."""
    path = folder / file_name(stored.key)
    write_calibration(path, stored)
    return path


def calibration(key: Key = KEY, fit: Fit | NoFit = FIT) -> Calibration:
    """A stored calibration with its overhead holding the context."""
    runs = [
        Point(replace(one.observation, job=key.job, gpu=key.gpu, versions=key.versions), one.replayed_bytes)
        for one in points((1_000, 2_000), (1_500, 2_520))
    ]
    runs = [replace(run, observation=replace(run.observation, settings=key.settings)) for run in runs]
    return Calibration(key, "measured", "made up", "2026-01-02", "2.13.0", True, tuple(runs), fit)


def plausible(**of_job: object) -> Calibration:
    """Two runs whose peaks are plausible: 1,000 and 2,000 MiB reserved, a tenth less allocated."""
    key = replace(KEY, job=JOB.replace(**of_job))
    known = calibration(key)
    points = []
    for number, point in enumerate(known.points, 1):
        run = replace(
            point.observation,
            peak_allocated_bytes=900 * number * MIB,
            peak_reserved_bytes=1_000 * number * MIB,
            process_peak_bytes=1_350 * number * MIB,
            about="a remark",
        )
        points.append(replace(point, observation=run))
    return replace(known, points=tuple(points), about="on my desk")
