"""What users contribute: packed without anything private, checked, and read below all else."""

from pathlib import Path

import pytest

from planner.errors import UsageError
from planner.hardware.calibration.contribution import check_contribution, pack
from planner.hardware.calibration.files import TABLES_FOLDER, calibration_text, file_name
from planner.hardware.calibration.lookup import (
    CONTEXT_SPREAD_BYTES,
    CalibrationQuery,
    MatchLevel,
    find_calibration,
)
from planner.hardware.device import MIB
from tests.helpers.calibrations import CARD, JOB, KEY, plausible, save_calibration
from tests.helpers.structs import replace

COMMUNITY = TABLES_FOLDER / "community"


def test_a_packed_file_is_without_fault(tmp_path: Path) -> None:
    """What is packed passes the check, reads back as it is, and has no remark of its author."""
    packed = pack(plausible())
    path = save_calibration(tmp_path, packed)
    assert check_contribution(path) == []
    assert (packed.source, packed.about) == ("contributed", "contributed")
    text = path.read_text(encoding="utf-8")
    assert "a remark" not in text and "my desk" not in text


def test_a_model_of_a_file_is_a_digest(tmp_path: Path) -> None:
    """Neither path nor name of the callable nor code are packed; other code is another digest."""
    own = plausible(source="", model="/home/ada/secret/train.py:Net", model_args=())
    one, other = (pack(own, lambda path, text=text: text) for text in (b"one", b"other"))
    texts = [calibration_text(each) for each in (one, other)]
    assert all(word not in text for text in texts for word in ("ada", "secret", "train.py", "Net"))
    assert one.key.job.model.name.startswith("file:") and one.key.job.model.name != other.key.job.model.name
    assert check_contribution(save_calibration(tmp_path, one)) == []


def test_a_guarded_model_is_its_structure() -> None:
    """The class of a user's model is not named."""
    own = plausible(source="", model="SecretNet", model_args=(("structure", "0123456789abcdef"),))
    packed = pack(own)
    assert (packed.key.job.model.name, packed.key.job.model.args) == ("module:0123456789abcdef", ())


def test_other_names_of_files_are_refused() -> None:
    """A loss or an optimizer of the user's own cannot be told to others."""
    with pytest.raises(UsageError, match=r"job.loss: names a file, a person or a machine; it cannot"):
        pack(plausible(loss="mine/losses.py:focal"))


@pytest.mark.parametrize("source", ["emulated", "published", "contributed"])
def test_only_measured_runs_are_packed(source: str) -> None:
    """An emulated run can never be contributed, under whatever name its GPU goes."""
    gpu = f"{KEY.gpu} (emulated)" if source == "emulated" else KEY.gpu
    own = replace(plausible(), source=source, key=replace(KEY, gpu=gpu))
    with pytest.raises(UsageError, match="only what was measured on a real GPU is contributed"):
        pack(own)


def test_an_emulated_gpu_called_measured_is_refused() -> None:
    """The GPU's name decides."""
    with pytest.raises(UsageError, match="only what was measured"):
        pack(replace(plausible(), key=replace(KEY, gpu=f"{KEY.gpu} (emulated)")))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"peak_allocated_bytes": 3_000 * MIB}, "peak_reserved_bytes: less than is allocated"),
        (
            {"peak_reserved_bytes": 2_001 * MIB},
            "peak_reserved_bytes: torch reserves whole multiples of 2 MiB",
        ),
        ({"process_peak_bytes": 900 * MIB}, "process_peak_bytes: less than torch has reserved"),
        ({"process_peak_bytes": 13_000 * MIB}, "process_peak_bytes: more than the GPU has"),
        ({"peak_reserved_bytes": None}, "peak_allocated_bytes: both peaks of torch are needed"),
        ({"when": "yesterday"}, "when: 'yesterday' is no day until today"),
    ],
)
def test_impossible_figures_are_named_with_their_point(
    tmp_path: Path, fields: dict[str, object], problem: str
) -> None:
    """Each relation of the peaks is held."""
    packed = pack(plausible())
    second = replace(packed.points[1], observation=replace(packed.points[1].observation, **fields))
    path = save_calibration(tmp_path, replace(packed, points=(packed.points[0], second)))
    assert check_contribution(path) == [f"{path}: points[1].{problem}"]


def test_peaks_that_no_batch_size_explains(tmp_path: Path) -> None:
    """The allocated peak is affine in the batch size, but for a fifth that workspaces may take."""
    packed = pack(plausible())
    third = packed.points[1].observation
    third = replace(third, batch=30, peak_allocated_bytes=900 * 3 * MIB, peak_reserved_bytes=3_000 * MIB,
                    process_peak_bytes=3_100 * MIB)  # fmt: skip
    points = (*packed.points, replace(packed.points[1], observation=third))
    assert check_contribution(save_calibration(tmp_path, replace(packed, points=points))) == []
    high = replace(points[1], observation=replace(points[1].observation, peak_allocated_bytes=600 * MIB))
    path = save_calibration(tmp_path, replace(packed, points=(points[0], high, points[2])))
    assert check_contribution(path) == [
        f"{path}: points: batch 20 is far from the line through batches 10 and 30"
    ]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"torch": "nightly"}, "versions.torch: 'nightly' is no known version"),
        ({"driver": "my-host 1"}, "versions.driver: 'my-host 1' is no known version"),
        ({"capability": (7, 5)}, "versions.capability: RTX 3060 12GB has 8.6"),
        (
            {"torch_total_bytes": 30_000 * MIB, "nvml_total_bytes": 30_000 * MIB},
            "gpu: 'NVIDIA GeForce RTX 3060' with this memory is not in the database",
        ),
    ],
)
def test_unknown_machines_are_refused(fields: dict[str, object], problem: str) -> None:
    """The GPU is one of the database, and versions look like versions."""
    own = plausible()
    with pytest.raises(UsageError) as caught:
        pack(replace(own, key=replace(own.key, versions=replace(own.key.versions, **fields))))
    assert f": {problem}; it cannot be contributed" in str(caught.value)


def test_broken_files_have_line_and_key(tmp_path: Path) -> None:
    """The format is read strictly; a file of another origin or name is refused."""
    path = save_calibration(tmp_path, pack(plausible()))
    path.write_text(path.read_text(encoding="utf-8").replace("peak_reserved_bytes:", "peak_reserved:"))
    (problem,) = check_contribution(path)
    assert problem.startswith(f"{path} line ") and "peak_reserved" in problem
    other = save_calibration(tmp_path, plausible()).rename(tmp_path / "other.yaml")
    assert [problem.partition(": ")[2] for problem in check_contribution(other)] == [
        "source: measured; a contributed file has source: contributed",
        "about: remarks are left out; it reads: contributed",
        f"the file's name belongs to another key; expected {file_name(plausible().key)}",
    ]


def test_what_is_contributed_here_is_without_fault() -> None:
    """Every file of the folder passes the check."""
    assert [
        problem for path in sorted(COMMUNITY.glob("*.yaml")) for problem in check_contribution(path)
    ] == []


def test_contributed_lines_answer_last() -> None:
    """A contributed line answers where no other has one, is wider, and says whose it is."""
    contributed = pack(plausible())
    query = CalibrationQuery(JOB, CARD, "2.6.0")
    alone = find_calibration([contributed], query)
    assert alone is not None
    assert (alone.level, alone.source) == (MatchLevel.EXACT, "contributed")
    assert alone.about.startswith("contributed by a user: torchvision:resnet18")
    assert alone.extra_spread_bytes == CONTEXT_SPREAD_BYTES
    own = find_calibration([contributed, plausible()], query)
    assert own is not None and own.source == "measured"
