"""The file of a cuDNN's answers: what is written reads back, and damage is named."""

from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from planner.errors import DataFileError
from planner.hardware.cudnn.answers_file import (
    ANSWERS_FILE,
    Kind,
    StoredGpus,
    Tables,
    open_answers,
    write_answers,
)
from planner.hardware.cudnn.curves import Curve
from planner.hardware.cudnn.keys import convolution_of, key_of

KEYS = ("d 64x56x56 64x64x3x3 1x1 1x1 1x1", "f 3x8x8x8 4x3x3x3x3 0x0x0 1x1x1 1x1x1", "w 3x9 4x3x3 0 1 1")
KINDS = tuple(Kind(dtype, last) for dtype in ("float16", "float32") for last in (False, True))
GPUS = (StoredGpus((7, 5), 40), StoredGpus((7, 5), 68), StoredGpus((12, 0), None))


def curves() -> st.SearchStrategy[Curve]:
    """Curves of up to three points; workspaces reach terabytes at batches that no GPU holds."""
    points = st.dictionaries(st.integers(1, 2**12), st.integers(0, 2**42), min_size=1, max_size=3)
    return points.map(lambda found: (tuple(sorted(found)), tuple(found[batch] for batch in sorted(found))))


def tables() -> st.SearchStrategy[Tables]:
    """Answers of some GPUs for some convolutions of some kinds."""
    answers = st.dictionaries(st.sampled_from(KEYS), curves(), min_size=1)
    of_kind = st.dictionaries(st.sampled_from(GPUS), answers, min_size=1)
    return st.dictionaries(st.sampled_from(KINDS), of_kind)


@given(tables())
def test_what_is_written_reads_back(tmp_path_factory: pytest.TempPathFactory, written: Tables) -> None:
    """Whatever the convolutions that each GPU answers for; the same answers are the same bytes."""
    path = tmp_path_factory.mktemp("answers") / "answers.bin"
    write_answers(path, "9.99.0", written)
    stored = open_answers(path)
    assert (stored.cudnn, stored.tables()) == ("9.99.0", written)
    content = path.read_bytes()
    write_answers(path, "9.99.0", stored.tables())
    assert path.read_bytes() == content


def test_the_file_that_ships_answers_for_each_convolution_on_each_gpu() -> None:
    """So that no GPU borrows what another has; keys rise, and name a convolution each."""
    stored = open_answers()
    assert stored.kinds
    for kind in stored.kinds:
        keys = stored.keys(kind)
        assert keys == sorted(set(keys))
        assert all(key_of(convolution_of(key, *kind, batch=2)) == key for key in keys[::50])
        for gpus in stored.gpus(kind):
            assert all(curve is not None for curve in stored.curves(kind, gpus))


@pytest.mark.parametrize(
    ("cut", "end"),
    [
        (slice(0, 1000), b""),
        (slice(0, -1), b""),
        (slice(0, None), b"more"),
        (slice(1, None), b""),
        (slice(0), b""),
    ],
    ids=["index cut", "cut", "longer", "no such file", "empty"],
)
def test_a_damaged_file_is_named(cut: slice, end: bytes, tmp_path: Path) -> None:
    """With what to do."""
    path = tmp_path / "answers.bin"
    path.write_bytes(ANSWERS_FILE.read_bytes()[cut] + end)
    with pytest.raises(
        DataFileError, match=r"answers\.bin: holds no answers of a cuDNN: .*install the planner again"
    ):
        open_answers(path)
