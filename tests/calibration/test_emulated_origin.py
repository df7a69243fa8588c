"""Figures of emulated GPUs are called emulated in every file, and never taken for measured ones."""

import json
from pathlib import Path

import pytest

from calibration.observations import (
    load_observation,
    observation_from_json,
    observation_to_json,
    save_observation,
)
from planner.allocator.config import AllocatorConfig
from planner.api.request.budget import stored_calibrations
from planner.emulator.gpu import describe_gpu
from planner.errors import DataFileError
from planner.hardware.budget import make_budget
from planner.hardware.calibration.files import (
    Origins,
    add_points,
    load_calibration,
    load_folders,
)
from planner.hardware.calibration.fit import fit_points, includes_context
from planner.hardware.calibration.lookup import CalibrationQuery, find_calibration, find_run, is_same_gpu
from planner.hardware.calibration.model import Calibration, Fit, NoFit, Observation, Point, origin_of
from planner.hardware.database import device_key, is_emulated
from tests.helpers.calibrations import CARD, FIT, JOB, KEY, calibration, observation, points, save_calibration
from tests.helpers.structs import replace

GPU = "NVIDIA GeForce RTX 3060 (emulated)"
EMULATED_KEY = replace(KEY, gpu=GPU)


def emulated(run: Observation) -> Observation:
    """Return the run as one on an emulated GPU."""
    return replace(run, gpu=GPU, source="emulated")


def emulated_points(*peaks: tuple[float, float]) -> list[Point]:
    """Runs with these replayed peaks and rises in MiB."""
    made = points([replayed for replayed, _ in peaks], [300 + rise for _, rise in peaks])
    return [replace(point, observation=emulated(point.observation)) for point in made]


def emulated_calibration(fit: Fit | NoFit = FIT) -> Calibration:
    """A stored calibration of the emulated GPU."""
    known = calibration(KEY, fit)
    runs = tuple(replace(point, observation=emulated(point.observation)) for point in known.points)
    return replace(known, key=EMULATED_KEY, source="emulated", includes_context=False, points=runs)


def test_the_name_shows_the_origin() -> None:
    """The names that emulated GPUs get end in a word that no real one has, and are of the same GPU."""
    name = describe_gpu(CARD).split(";")[0].removeprefix("name=")
    assert is_emulated(name) and origin_of(name) == "emulated"
    assert origin_of(KEY.gpu) == "measured"
    assert device_key(name) == device_key(CARD.name)
    assert is_same_gpu(CARD, GPU, KEY.versions)


@pytest.mark.parametrize(("gpu", "source"), [(GPU, "measured"), (GPU, "published"), (KEY.gpu, "emulated")])
def test_no_observation_has_another_origin_than_its_gpu(gpu: str, source: str) -> None:
    """Neither in memory nor in a file can an emulated run be called measured, nor a measured one emulated."""
    with pytest.raises(ValueError, match=f"source: figures of .* are .*, not {source}"):
        replace(observation(8, 1_000), gpu=gpu, source=source)
    fields = observation_to_json(observation(8, 1_000)) | {"gpu": gpu, "source": source}
    with pytest.raises(ValueError, match="source: "):
        observation_from_json(fields)


def test_the_origin_survives_every_file(tmp_path: Path) -> None:
    """An observation file and a calibration file give back what was written, `emulated` among it."""
    run = emulated(observation(8, 1_000))
    save_observation(run, tmp_path / "run.json")
    assert json.loads((tmp_path / "run.json").read_text())["source"] == "emulated"
    assert load_observation(tmp_path / "run.json") == run
    made = emulated_points((1_000, 1_010), (2_000, 2_010), (3_000, 3_010), (4_000, 4_010))
    calibration = add_points(tmp_path, EMULATED_KEY, made, Origins("emulated", "", "2.13.0"), fit_points)
    assert load_folders([tmp_path]) == (calibration,)
    assert calibration.source == "emulated" and isinstance(calibration.fit, Fit)


@pytest.mark.parametrize(("old", "new"), [("source: emulated", "source: measured"), (" (emulated)", "")])
def test_a_calibration_file_that_lies_about_its_origin_is_refused(tmp_path: Path, old: str, new: str) -> None:
    """The name of the GPU and the origin have to agree."""
    path = save_calibration(tmp_path, emulated_calibration())
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(DataFileError, match=r"source: figures of .* are (emulated|measured)"):
        load_calibration(path)


def test_emulated_and_measured_runs_share_no_file(tmp_path: Path) -> None:
    """Runs of another origin are refused before anything is written."""
    with pytest.raises(ValueError, match="batch 10 is emulated"):
        add_points(
            tmp_path, EMULATED_KEY, emulated_points((1, 2)), Origins("measured", "", "2.13.0"), fit_points
        )
    assert list(tmp_path.glob("*.yaml")) == []


def test_emulated_and_measured_runs_share_no_line() -> None:
    """A mixture is refused, whatever its proportion."""
    peaks = (1_000, 1_010), (2_000, 2_010), (3_000, 3_010), (4_000, 4_010)
    measured = points([x for x, _ in peaks], [300 + y for _, y in peaks])
    with pytest.raises(ValueError, match="not fitted together"):
        fit_points([*emulated_points(*peaks), measured[0]])


def test_an_emulated_context_enters_no_line() -> None:
    """The line is that of the rise over the context, which is the device database's; nothing loads lazily."""
    made = emulated_points((1_000, 1_000), (2_000, 2_000), (3_000, 3_000), (4_000, 4_000))
    assert all(point.observation.process_peak_bytes is not None for point in made)
    assert not includes_context(made)
    fit = fit_points(made)
    assert isinstance(fit, Fit)
    assert (fit.overhead_bytes, fit.slope) == (0, 1.0)


def test_an_emulated_context_answers_for_no_card() -> None:
    """Runs without a line give a measured context, and emulated ones none."""
    refused = NoFit("3 batch sizes")
    assert find_calibration([calibration(fit=refused)], CalibrationQuery(JOB, CARD)) is not None
    assert find_calibration([emulated_calibration(fit=refused)], CalibrationQuery(JOB, CARD)) is None


def test_a_measured_line_goes_before_an_emulated_one() -> None:
    """An emulated calibration answers where no measured line does, and is named emulated."""
    query = CalibrationQuery(JOB, CARD, "2.6.0")
    far = replace(calibration(), key=replace(KEY, versions=replace(KEY.versions, torch="2.9.0")))
    both = find_calibration([emulated_calibration(), far], query)
    assert both is not None and both.source == "measured"
    alone = find_calibration([emulated_calibration()], query)
    assert alone is not None
    assert (alone.source, alone.context, alone.includes_context) == ("emulated", None, False)
    assert alone.about.endswith("(emulated), torch 2.6.0+cu124, emulated")
    context = find_calibration([emulated_calibration(), calibration(fit=NoFit("3 batch sizes"))], query)
    assert context is not None and context.source == "emulated"


def test_an_emulated_run_is_no_measured_value() -> None:
    """`compare` holds estimators against measured runs alone."""
    known = emulated_calibration()
    run = replace(known.points[0].observation, peak_allocated_bytes=7)
    stored = replace(known, points=(replace(known.points[0], observation=run),))
    assert find_run([stored], CalibrationQuery(JOB, CARD), run.batch) is None


def test_only_folders_that_are_given_may_answer_with_emulated_figures(tmp_path: Path) -> None:
    """Emulated calibrations of the user's own folder are ignored unless the folder is named."""
    save_calibration(tmp_path, emulated_calibration())
    save_calibration(tmp_path, calibration())
    budget = make_budget(CARD, 0.99, AllocatorConfig())
    own = stored_calibrations(budget, {"own_calibrations": tmp_path})
    given = stored_calibrations(budget, {"calibrations": tmp_path, "own_calibrations": tmp_path})
    here = {known.source for known in own if known.key.job == JOB}
    assert here == {"measured"}
    assert {known.source for known in given if known.key.job == JOB} == {"measured", "emulated"}
