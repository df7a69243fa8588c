"""Stored answers of cuDNN: curves through workspaces, similar convolutions, and the file that ships."""

from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from planner.hardware.cudnn.answers_file import Kind, StoredGpus, open_answers, write_answers
from planner.hardware.cudnn.curves import fit_curve, value_at
from planner.hardware.cudnn.keys import key_of
from planner.hardware.cudnn.stored import StoredWorkspaces, stored_answers
from planner.hardware.cudnn.workspace_breakdown import Term, layer_workspaces
from planner.program.events import Alloc, Category, Free, Site, Trace
from planner.program.kernels.convolution import Convolution, ConvWorkspace, ConvWorkspaceSource, Direction
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


Query = partial[StoredWorkspaces]


@pytest.fixture
def query(tmp_path: Path) -> Query:
    """Answers by a file with one convolution, of 1 MiB a sample."""
    curve = ((1, 1024), (MIB, 1024 * MIB))
    path = tmp_path / "answers.bin"
    table = {StoredGpus(AMPERE, None): {key_of(convolution(1)): curve}}
    write_answers(path, "9.99.0", {Kind("float32", channels_last=False): table})
    return partial(StoredWorkspaces, path=path)


def test_a_stored_convolution_at_any_batch_size(query: Query) -> None:
    """The note names the version."""
    answers = query(benchmark=False)
    assert answers(AMPERE, 28, convolution(7)).workspace_bytes == 7 * MIB
    assert answers.account(AMPERE, 28).notes == (
        "convolutions take the workspaces that cuDNN 9.99.0 requests, by stored answers",
    )


def test_a_similar_convolution_is_scaled_and_named(query: Query) -> None:
    """By the elements of input, output and weight at the batch size; one of another kernel has no similar one
    and counts as empty.
    """
    answers = query(benchmark=True)
    assert answers(AMPERE, 28, convolution(7)).workspace_bytes == 7 * MIB
    for batch in (1, 7, 1024):  # the weights count more in a small batch
        own, weight = 2 * batch * 64 * 56 * 56, 64 * 64 * 9
        borrowed = round(batch * MIB * (own // 4 + weight) / (own + weight))
        assert answers(AMPERE, 28, convolution(batch, extent=28)).workspace_bytes == borrowed
    assert answers(AMPERE, 28, convolution(7, kernel=1)).workspace_bytes == 0
    first, second, third = answers.account(AMPERE, 28).notes
    far = "whose channels and extents differ by a factor of up to 4.0 in all"
    assert f"1 of 3 are not among them and borrow those of similar ones, {far}" in first
    assert second == "no workspace is counted for 1 of 3 convolutions"
    assert "lack the engines that cudnn.benchmark times" in third
    assert answers.account(AMPERE, 28).source is ConvWorkspaceSource.SIMILAR
    by_elements = 1 / (1 + 1 + 1 / 4)  # of x and y
    assert answers.account(AMPERE, 28).uncounted_share == pytest.approx(by_elements)


def test_channels_borrow_from_those_with_as_large_a_power_of_two(tmp_path: Path) -> None:
    """Engines for tensor cores take channels by fours or eights: 20 are more like 12 or 28 than 16."""
    copies = dict.fromkeys((12, 28, 36), 1) | dict.fromkeys((16, 24, 32), 9)
    stored = {channels: ((1,), (count * channels * MIB,)) for channels, count in copies.items()}
    table = {key_of(convolution(1, channels=channels)): curve for channels, curve in stored.items()}
    path = tmp_path / "answers.bin"
    write_answers(path, "9.99.0", {Kind("float32", channels_last=False): {StoredGpus(AMPERE, None): table}})
    answers = StoredWorkspaces(benchmark=False, path=path)
    borrowed = answers(AMPERE, 28, convolution(1, channels=20)).workspace_bytes
    assert borrowed == pytest.approx(20 * MIB, rel=0.1)


def test_the_share_that_borrows_from_far_is_told_apart(query: Query) -> None:
    """By the elements of input and output; a note says what is not known."""
    answers = query(benchmark=False)
    for extent in (56, 28, 14):  # of half the extents: a factor of 4 in all, the last that is near
        answers(AMPERE, 28, convolution(7, extent=extent))
    account = answers.account(AMPERE, 28)
    assert account.far_share == pytest.approx((1 / 16) / (1 + 1 / 4 + 1 / 16))
    uncertain = "where retries begin is uncertain: 1 of 3 convolutions"
    assert any(note.startswith(uncertain) for note in account.notes)


def test_one_lender_alone_does_not_decide(tmp_path: Path) -> None:
    """Of three convolutions that are as similar, one has an engine that takes dozens of copies: it is lent by
    none, at any batch size.
    """
    own, outlier = ((1, 1024), (MIB, 1024 * MIB)), ((1, 1024), (75 * MIB, 75 * 1024 * MIB))
    extents = {55: own, 56: outlier, 57: own}
    table = {key_of(convolution(1, extent=extent)): curve for extent, curve in extents.items()}
    path = tmp_path / "answers.bin"
    write_answers(path, "9.99.0", {Kind("float32", channels_last=False): {StoredGpus(AMPERE, None): table}})
    answers = StoredWorkspaces(benchmark=False, path=path)
    assert answers(AMPERE, 28, convolution(2, extent=56)).workspace_bytes == 150 * MIB
    for batch in (1, 64):
        borrowed = answers(AMPERE, 28, convolution(batch, extent=54)).workspace_bytes
        assert 0.9 * batch * MIB < borrowed < batch * MIB


def test_a_newer_gpu_takes_the_answers_of_the_nearest_older_one(query: Query) -> None:
    """A GPU that is older than all takes those of the oldest."""
    for capability in ((8, 7), (12, 1), (6, 1)):
        answers = query(benchmark=False)
        assert answers(capability, 28, convolution(7)).workspace_bytes == 7 * MIB
        note, *_ = answers.account(capability, 28).notes
        assert note.endswith("by stored answers for compute capability 8.6")


def test_turing_takes_the_answers_of_the_nearest_number_of_multiprocessors() -> None:
    """There alone it decides; a note names whose answers they are, unless they are the GPU's own.

    What is said of one GPU does not depend on the others that were asked about.
    """
    answers = StoredWorkspaces(benchmark=False)
    named = {40: "", 46: " for compute capability 7.5 with 40 multiprocessors", 68: ""}
    for sm_count in named:
        answers((7, 5), sm_count, convolution(7))
    for sm_count, whose in named.items():
        note, *_ = answers.account((7, 5), sm_count).notes
        assert note.partition(";")[0].endswith(f"by stored answers{whose}")
    sources = [answers.account((7, 5), sm_count).source for sm_count in named]
    exact, similar = ConvWorkspaceSource.STORED, ConvWorkspaceSource.SIMILAR
    assert sources == [exact, similar, exact]


def test_a_type_without_stored_answers_is_named(query: Query) -> None:
    """Nothing is counted for it, and nothing else is said."""
    answers = query(benchmark=False)
    double = replace(convolution(7), dtype="float64")
    assert answers(AMPERE, 28, double).workspace_bytes == 0
    assert answers.account(AMPERE, 28).notes == ("no workspace is counted for 1 of 1 convolutions",)
    assert answers.account(AMPERE, 28).source is ConvWorkspaceSource.UNCOUNTED
    assert answers.account(AMPERE, 28).uncounted_share == 1


@pytest.mark.parametrize("gpus", open_answers().gpus(Kind("float32", channels_last=False)), ids=str)
def test_the_file_that_ships(gpus: StoredGpus) -> None:
    """A ResNet's layers have answers in float32, of a few copies of both operands at most."""
    answers = stored_answers(gpus.capability, gpus.sm_count or 100, "float32", channels_last=False)
    assert answers is not None
    curve = answers.find(key_of(convolution(1)))
    assert curve is not None
    operand_bytes = 4 * 256 * 64 * 56 * 56
    assert 0 <= value_at(curve, 256) <= 8 * operand_bytes


def test_gpus_with_the_same_answers_share_them() -> None:
    """They are read once, whatever the number of multiprocessors, and for bfloat16 with float16."""
    of_3060, of_3090 = (stored_answers(AMPERE, count, "float16", channels_last=False) for count in (28, 82))
    assert of_3060 is of_3090 is stored_answers(AMPERE, 28, "bfloat16", channels_last=False)
    of_ada = stored_answers((8, 9), 128, "float16", channels_last=False)
    assert of_3060 is not None and of_ada is not None and of_3060.keys is of_ada.keys


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("direction", Direction)
def test_volumes_have_answers_of_their_own(dtype: str, direction: Direction) -> None:
    """On every GPU, for a patch of nnU-Net in training: of a few copies of its operands."""
    x, w, ones = (2, 32, 128, 128, 128), (32, 32, 3, 3, 3), (1, 1, 1)
    query = Convolution(direction, dtype, x, w, x, False, ones, ones, ones)
    operand_bytes = (4 if dtype == "float32" else 2) * 2 * 32 * 128**3
    for gpus in open_answers().gpus(Kind(dtype, channels_last=False)):
        answers = StoredWorkspaces(benchmark=False)
        size_bytes = answers(gpus.capability, gpus.sm_count or 100, query).workspace_bytes
        assert 0 <= size_bytes <= 6 * operand_bytes
        assert answers.account(gpus.capability, gpus.sm_count or 100).source is ConvWorkspaceSource.STORED
        assert answers.account(gpus.capability, gpus.sm_count or 100).uncounted_share == 0


def test_a_stored_workspace_is_named_by_its_size() -> None:
    """A copy of x and y is one, whatever answered; only the term of published runs is summed by image."""
    x, w, size_bytes = (2, 64, 56, 56), (64, 64, 3, 3), 2 * 4 * 2 * 64 * 56 * 56
    row = ConvWorkspace.from_query(1, convolution(2), None, searched=False)
    events = Alloc(1, size_bytes, Category.WORKSPACE, 0, may_fail=True), Free(1)
    trace = Trace(events, (Site("body", "aten.convolution.default"),), 2, (), (), (), (row,))
    (layer,) = layer_workspaces(trace)
    assert (row.x, row.w, layer.engine) == (x, w, None)
    assert [(part.term, part.of) for part in layer.parts] == [(Term.COPY, "x"), (Term.COPY, "y")]
