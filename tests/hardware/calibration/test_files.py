"""Calibrations as files."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from planner.errors import DataFileError, UsageError
from planner.hardware.calibration.files import (
    TABLES_FOLDER,
    Origins,
    add_points,
    file_name,
    key_of,
    load_calibration,
    load_folders,
    search_path,
)
from planner.hardware.calibration.fit import fit_points
from planner.hardware.calibration.lookup import CalibrationQuery, MatchLevel, find_calibration
from planner.hardware.calibration.model import Fit, NoFit, Point
from planner.hardware.database import find_device
from tests.helpers.calibrations import JOB, KEY, REFUSAL, calibration, observation, points, save_calibration
from tests.helpers.structs import replace

ORIGINS = Origins("measured", "made up", "2.13.0")
REPLAYED = (1_000, 2_000, 3_000, 4_000)


@pytest.mark.parametrize("stored", [calibration(), calibration(fit=REFUSAL)])
def test_there_and_back(tmp_path: Path, stored: object) -> None:
    """A saved calibration is loaded, to the last field, with a line or with a reason for none."""
    path = save_calibration(tmp_path, stored)  # type: ignore[arg-type]
    assert load_calibration(path) == stored
    assert load_folders([tmp_path, tmp_path / "none"]) == (stored,)


@given(st.text(max_size=30), st.one_of(st.none(), st.integers(0, 2**49)), st.booleans())
@settings(max_examples=40)
def test_any_text_and_size(
    tmp_path_factory: pytest.TempPathFactory, about: str, size: int | None, oom: bool
) -> None:
    """Any remark, size and flag comes back as it went."""
    about = about.encode("utf-8", "ignore").decode()
    stored = calibration()
    run = replace(stored.points[0].observation, about=about, peak_allocated_bytes=size, oom=oom)
    stored = replace(stored, about=about, points=(Point(run, 5),))
    assert load_calibration(save_calibration(tmp_path_factory.mktemp("any"), stored)) == stored


def test_adding_fits_all(tmp_path: Path) -> None:
    """Runs add up over calls, are fitted together from four batch sizes on, and the same run counts once."""
    runs = points(REPLAYED, [500 + x for x in REPLAYED])
    first = add_points(tmp_path, KEY, runs[:3], ORIGINS, fit_points)
    assert not isinstance(first.fit, Fit)
    second = add_points(tmp_path, KEY, runs[1:], ORIGINS, fit_points)
    assert second.points == tuple(runs)
    assert isinstance(second.fit, Fit)
    assert second.includes_context
    assert load_folders([tmp_path]) == (second,)


def test_replayed_anew(tmp_path: Path) -> None:
    """A run that is there already counts once, with the replayed peak that came last."""
    run = points([1_000], [1_500])[0]
    add_points(tmp_path, KEY, [run], ORIGINS, fit_points)
    again = replace(run, replayed_bytes=77)
    assert add_points(tmp_path, KEY, [again], ORIGINS, fit_points).points == (again,)


def test_one_file_per_key(tmp_path: Path) -> None:
    """Another version, GPU, job or setting is another file."""
    keys = [
        KEY,
        replace(KEY, gpu="RTX 4090"),
        replace(KEY, job=JOB.replace(steps=9)),
        replace(KEY, versions=replace(KEY.versions, driver="550")),
        replace(KEY, settings=replace(KEY.settings, matmul_tf32=True)),
    ]
    for key in keys:
        save_calibration(tmp_path, calibration(key))
    assert len({file_name(key) for key in keys}) == 5
    assert {known.key for known in load_folders([tmp_path])} == set(keys)


def test_points_of_another_key(tmp_path: Path) -> None:
    """A run of another GPU is no point of this key."""
    foreign = Point(replace(observation(8, 1_500), gpu="RTX 4090"), 5)
    with pytest.raises(ValueError, match="another key"):
        add_points(tmp_path, KEY, [foreign], ORIGINS, fit_points)


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from tests.helpers.structs import replace
from tests.helpers.calibrations import KEY, observation
from planner.hardware.calibration.fit import fit_points
from planner.hardware.calibration.files import Origins, add_points
from planner.hardware.calibration.model import Point
for number in range(50):
    run = replace(observation(1 + number, 1_000), about=sys.argv[2])
    add_points(Path(sys.argv[1]), KEY, [Point(run, 5)], Origins("measured", "", "2.13"), fit_points)
    other = replace(KEY, gpu=f"card {sys.argv[2]} {number}")
    run = replace(run, gpu=other.gpu)
    add_points(Path(sys.argv[1]), other, [Point(run, 5)], Origins("measured", "", "2.13"), fit_points)
"""


@pytest.mark.slow
def test_two_processes_lose_nothing(tmp_path: Path) -> None:
    """Two processes that add 50 runs each to one file, and 50 files each beside it, lose none."""
    here = str(Path(__file__).parents[3])
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), name, here]) for name in ("a", "b")
    ]
    assert [writer.wait(timeout=300) for writer in writers] == [0, 0]
    shared = load_calibration(tmp_path / file_name(KEY))
    seen = {(point.observation.about, point.observation.batch) for point in shared.points}
    assert seen == {(name, batch) for name in ("a", "b") for batch in range(1, 51)}
    assert len(load_folders([tmp_path])) == 101
    assert list(tmp_path.glob("*.partial")) == []


WHOLE = "schema: 2\nkind: calibration\n"


def broken_texts(tmp_path: Path) -> list[tuple[str, str]]:
    """Return files that are no calibrations, each with its error."""
    text = save_calibration(tmp_path / "good", calibration()).read_text()
    laughs = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
    return [
        ("", "the file is empty"),
        (text[: len(text) // 2], ""),
        ("[1, 2]", "expected keys with values"),
        ("name: RTX 3060\n", "no calibration"),
        (WHOLE + laughs, "unknown key"),
        ("[" * 5_000, ""),
        (text.replace("schema: 2", "schema: 3"), "newer than 2, the newest known: update the planner"),
        (text.replace("schema: 2", "schema: 0"), "unsupported schema 0; this version reads 1 and 2"),
        (text.replace("schema: 2", "schema: one"), "a whole number"),
        (text.replace("slope: 1.02", "slope: .nan"), "fit.slope"),
        (text.replace("slope: 1.02", "slope: !!python/object/apply:os.system [echo]"), "fit.slope"),
        (text.replace("batch: 10", "batch: 10.5"), "whole number"),
        (text.replace("oom: false", "oom: no"), "true or false"),
        (text.replace("mode: train", "mode: fly"), "no job"),
        (text.replace("mode: train", "mode: train\n  wings: 2"), "no 'wings'"),
        (
            text.replace("source: measured", "source: guessed"),
            "one of contributed, emulated, measured, published",
        ),
        (text.replace("rate: 0.5", "rate: {a: {b: {c: {d: {e: {f: {g: {h: {i: 1}}}}}}}}}"), "no job"),
        (re.sub(r"points:\n- (.|\n)*", "points: []\n", text), "a list of at least 1"),
    ]


def test_broken_files(tmp_path: Path) -> None:
    """Each broken, foreign or hostile file gives one line that names it, stays as it was, and nothing is lost
    by trying to add to it.
    """
    for number, (text, expected) in enumerate(broken_texts(tmp_path)):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = folder / file_name(KEY)
        path.write_text(text)
        for attempt in (
            lambda path=path: load_calibration(path),
            lambda folder=folder: add_points(folder, KEY, points([1], [1]), ORIGINS, fit_points),
        ):
            with pytest.raises(DataFileError) as raised:
                attempt()
            message = str(raised.value)
            assert expected in message, (text[:80], message)
            assert message.startswith(str(path))
            assert "\n" not in message
            assert len(message) < 600
        assert path.read_text() == text


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    """A file that is no text, a folder in its place, and a link to nowhere are errors of one line."""
    path = tmp_path / file_name(KEY)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataFileError, match="not readable"):
        load_calibration(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(DataFileError, match="not readable"):
        add_points(tmp_path, KEY, [], ORIGINS, fit_points)
    path.rmdir()
    path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataFileError, match="not readable"):
        add_points(tmp_path, KEY, [], ORIGINS, fit_points)


def test_foreign_calibration(tmp_path: Path) -> None:
    """A whole calibration of another GPU under this name is left alone."""
    other = save_calibration(tmp_path, calibration(replace(KEY, gpu="RTX 4090")))
    path = other.rename(tmp_path / file_name(KEY))
    text = path.read_text()
    with pytest.raises(DataFileError, match="move it away"):
        add_points(tmp_path, KEY, [], ORIGINS, fit_points)
    assert path.read_text() == text


def test_sources_do_not_mix(tmp_path: Path) -> None:
    """Published runs are not added to measured ones."""
    save_calibration(tmp_path, calibration())
    with pytest.raises(DataFileError, match="take another folder"):
        add_points(tmp_path, KEY, [], replace(ORIGINS, source="published"), fit_points)


def test_older_jobs(tmp_path: Path) -> None:
    """A file from before jobs had an option stands for the option's default."""
    path = save_calibration(tmp_path, calibration())
    text = path.read_text()
    assert "  keep_grads: false\n" in text
    path.write_text(text.replace("  keep_grads: false\n", ""))
    assert load_calibration(path) == calibration()


@pytest.mark.parametrize("flag", ["true", "false"])
def test_older_settings(tmp_path: Path, flag: str) -> None:
    """A file that names cuDNN's benchmark mode among the settings gives it to the job."""
    path = save_calibration(tmp_path, calibration())
    text = path.read_text()
    assert "  cudnn_tf32: true\n" in text
    path.write_text(text.replace("  cudnn_tf32: true\n", f"  cudnn_tf32: true\n  cudnn_benchmark: {flag}\n"))
    job = JOB.replace(cudnn_benchmark=flag == "true")
    assert load_calibration(path).key == replace(KEY, job=job)
    assert {point.observation.job for point in load_calibration(path).points} == {job}


def test_search_path(tmp_path: Path) -> None:
    """Given folders come first, then the package's tables, those of users last; a missing one is an error."""
    assert search_path([tmp_path]) == (tmp_path, TABLES_FOLDER, TABLES_FOLDER / "community")
    with pytest.raises(UsageError, match="no such folder"):
        search_path([tmp_path / "none"])


def test_tables_that_ship() -> None:
    """Each shipped table states where its figures come from, and its line or refusal is what its points
    give; of sixteen, ten have too few points or scatter too much for a line.
    """
    tables = load_folders([TABLES_FOLDER])
    assert (len(tables), sum(isinstance(table.fit, NoFit) for table in tables)) == (16, 10)
    assert {table.key.gpu for table in tables} == {"NVIDIA H200", "RTX 3060 12GB", "RTX 4060 8GB"}
    for table in tables:
        assert table.about
        assert all(point.observation.about for point in table.points) or table.source == "measured"
        again = fit_points(table.points)
        assert key_of(table.points[0].observation) == table.key
        if isinstance(again, NoFit) or isinstance(table.fit, NoFit):
            assert again == table.fit
            continue
        assert abs(again.overhead_bytes - table.fit.overhead_bytes) <= 2**20
        assert again.slope == pytest.approx(table.fit.slope, abs=1e-4)


def test_published_tables_hold_no_context() -> None:
    """The published tables state that the context is not in their overhead, and answer for their own GPU
    where they have a line.
    """
    published = [table for table in load_folders([TABLES_FOLDER]) if table.source == "published"]
    assert {(table.includes_context, "WITHOUT the context" in table.about) for table in published} == {
        (False, True)
    }
    for table in published:
        correction = find_calibration(
            published, CalibrationQuery(table.key.job, find_device(table.key.gpu), "2.13.0")
        )
        if isinstance(table.fit, NoFit):
            assert correction is None or correction.level is not MatchLevel.SAME_GPU
        else:
            assert correction is not None
            assert (correction.level, correction.fit) == (MatchLevel.SAME_GPU, table.fit)
