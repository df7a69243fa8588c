"""Stored answers of cuDNN: curves through workspaces, similar convolutions, and the files that ship."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, strategies as st

from planner._support.gzip_text import pack
from planner.hardware.cudnn import stored
from planner.hardware.cudnn.stored import (
    StoredFile,
    StoredGpus,
    StoredWorkspaces,
    file_name,
    fit_curve,
    key_of,
    stored_answers,
    stored_gpus,
    value_at,
)
from planner.hardware.cudnn.workspace_breakdown import Term, layer_workspaces
from planner.program.convolution import Convolution, ConvWorkspace, Direction
from planner.program.events import Alloc, Category, Free, Site, Trace
from tests.helpers.models import AMPERE
from tests.helpers.structs import replace

MIB = 2**20
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def convolution(batch: int, channels: int = 64, extent: int = 56, kernel: int = 3) -> Convolution:
    """A convolution onto as many channels, with its output as large as its input."""
    x, w, pad = (batch, channels, extent, extent), (channels, channels, kernel, kernel), kernel // 2
    return Convolution(Direction.FORWARD, "float32", x, w, x, False, (pad, pad), (1, 1), (1, 1))


@given(st.integers(0, 2**30), st.integers(0, 2**24), st.integers(1, 2**12))
def test_a_line_is_kept_exactly(fixed: int, slope: int, batch: int) -> None:
    """Workspaces that are copies of tensors are affine; equal ones then reuse one block, as in a run."""
    curve = fit_curve(lambda size: fixed + slope * size, BATCHES)
    error = value_at(curve, batch) - (fixed + slope * batch)
    assert error == 0 or abs(error) <= 2**18 * max(
        batch / BATCHES[-1], 1
    )  # below which a line counts as flat


@given(st.integers(5, 800), st.integers(2 * MIB, 2**30), st.integers(2 * MIB, 2**30))
def test_a_step_is_found(place: int, below: int, above: int) -> None:
    """A change to another engine is located within a sixteenth of the batch size."""
    curve = fit_curve(lambda batch: below if batch < place else above, BATCHES)
    assert abs(value_at(curve, max(place - place // 8 - 1, 1)) - below) <= 4096
    assert abs(value_at(curve, place + place // 8 + 1) - above) <= 4096


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replace the files that ship by one with one convolution, of 1 MiB a sample."""
    curve = ((1, 1024), (MIB, 1024 * MIB))
    file = StoredFile("9.99.0", [curve], {key_of(convolution(1)): 0})
    path = tmp_path / file_name(StoredGpus(AMPERE, None), "float32", channels_last=False)
    path.write_bytes(pack(msgspec.json.encode(file).decode()))
    monkeypatch.setattr(stored, "FOLDER", tmp_path)
    stored_answers.cache_clear()
    stored_gpus.cache_clear()
    yield
    stored_answers.cache_clear()
    stored_gpus.cache_clear()


@pytest.mark.usefixtures("answers")
def test_a_stored_convolution_at_any_batch_size() -> None:
    """The note names the version."""
    query = StoredWorkspaces(benchmark=False)
    assert query(AMPERE, 28, convolution(7)).workspace_bytes == 7 * MIB
    assert query.notes(AMPERE) == (
        "convolutions take the workspaces that cuDNN 9.99.0 requests, by stored answers",
    )


@pytest.mark.usefixtures("answers")
def test_a_similar_convolution_is_scaled_and_named() -> None:
    """By the elements of input and output; one of another kernel has no similar one and counts as empty."""
    query = StoredWorkspaces(benchmark=True)
    assert query(AMPERE, 28, convolution(7)).workspace_bytes == 7 * MIB
    assert query(AMPERE, 28, convolution(7, extent=28)).workspace_bytes == 7 * MIB // 4
    assert query(AMPERE, 28, convolution(7, kernel=1)).workspace_bytes == 0
    first, second, third = query.notes(AMPERE)
    far = "whose channels and extents differ by a factor of up to 4.0 in all"
    assert f"1 of 3 are not among them and borrow those of similar ones, {far}" in first
    assert second == "no workspace is counted for 1 of 3 convolutions"
    assert "lack the engines that cudnn.benchmark times" in third


@pytest.mark.usefixtures("answers")
def test_a_newer_gpu_takes_the_answers_of_the_nearest_older_one() -> None:
    """A GPU that is older than all takes those of the oldest."""
    for capability in ((8, 7), (12, 1), (6, 1)):
        query = StoredWorkspaces(benchmark=False)
        assert query(capability, 28, convolution(7)).workspace_bytes == 7 * MIB
        assert query.notes(capability)[0].endswith("by stored answers for compute capability 8.6")


def test_turing_takes_the_answers_of_the_nearest_number_of_multiprocessors() -> None:
    """There alone it decides; a note names whose answers they are, unless they are the GPU's own."""
    for sm_count, named in ((40, ""), (46, " for compute capability 7.5 with 40 multiprocessors"), (68, "")):
        query = StoredWorkspaces(benchmark=False)
        query((7, 5), sm_count, convolution(7))
        assert query.notes((7, 5))[0].partition(";")[0].endswith(f"by stored answers{named}")


@pytest.mark.usefixtures("answers")
def test_a_type_without_stored_answers_is_named() -> None:
    """Nothing is counted for it, and nothing else is said."""
    query = StoredWorkspaces(benchmark=False)
    double = replace(convolution(7), dtype="float64")
    assert query(AMPERE, 28, double).workspace_bytes == 0
    assert query.notes(AMPERE) == ("no workspace is counted for 1 of 1 convolutions",)


@pytest.mark.parametrize("gpus", stored_gpus(), ids=str)
def test_files_that_ship(gpus: StoredGpus) -> None:
    """A ResNet's layers have answers in float32, of a few copies of both operands at most."""
    answers = stored_answers(gpus.capability, gpus.sm_count or 100, "float32", channels_last=False)
    assert answers is not None
    curve = answers.find(key_of(convolution(1)))
    assert curve is not None
    operand_bytes = 4 * 256 * 64 * 56 * 56
    assert 0 <= value_at(curve, 256) <= 8 * operand_bytes


@pytest.mark.usefixtures("answers")
def test_a_stored_workspace_is_named_by_its_size() -> None:
    """A copy of x and y is one, whatever answered; only the term of published runs is summed by image."""
    x, w, size_bytes = (2, 64, 56, 56), (64, 64, 3, 3), 2 * 4 * 2 * 64 * 56 * 56
    row = ConvWorkspace.from_query(1, convolution(2), None, searched=False)
    events = Alloc(1, size_bytes, Category.WORKSPACE, 0, may_fail=True), Free(1)
    trace = Trace(events, (Site("body", "aten.convolution.default"),), 2, (), (), (), (row,))
    (layer,) = layer_workspaces(trace)
    assert (row.x, row.w, layer.engine) == (x, w, None)
    assert [(part.term, part.of) for part in layer.parts] == [(Term.COPY, "x"), (Term.COPY, "y")]
