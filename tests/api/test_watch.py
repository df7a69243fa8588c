"""`planner.watch` around code that runs out of GPU memory."""

import warnings
from pathlib import Path

import pytest
import torch

import planner

MESSAGE = (
    "CUDA out of memory. Tried to allocate 64.00 MiB (GPU 0; 8.00 GiB total capacity; 7.50 GiB "
    "already allocated; "
    "0 bytes free; 7.50 GiB reserved in total by PyTorch)"
)


def test_an_error_goes_on_with_a_snapshot_and_a_diagnosis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The warning has the path of the snapshot and the cause; the error is the same object."""
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_text("snapshot"))
    error = torch.cuda.OutOfMemoryError(MESSAGE)
    raises = pytest.raises(torch.cuda.OutOfMemoryError)
    with pytest.warns(UserWarning) as told, raises as caught, planner.watch(tmp_path):
        raise error
    (snapshot,) = tmp_path.glob("out-of-memory-*.pickle")
    text = str(told[0].message)
    assert caught.value is error
    assert text.startswith(f"planner.watch: memory snapshot written to {snapshot}\nThe job needs more memory")
    assert "test_watch.py" in text and Path(told[0].filename) == Path(__file__)


def test_a_problem_of_the_diagnosis_hides_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU no snapshot can be written, and warnings may be errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(torch.cuda.OutOfMemoryError, match="^broken$"), planner.watch(tmp_path / "none"):
            raise torch.cuda.OutOfMemoryError("broken")


@pytest.mark.parametrize("error", [ValueError("CUDA out of memory"), KeyboardInterrupt()])
def test_other_errors_are_left_alone(tmp_path: Path, error: BaseException) -> None:
    """Only the errors of CUDA's memory are diagnosed."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(type(error)), planner.watch(tmp_path):
            raise error
    assert list(tmp_path.iterdir()) == []
