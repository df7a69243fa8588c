"""`planner.watch` around code that runs out of GPU memory."""

import pickle
import warnings
from pathlib import Path
from typing import Any

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


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`"), "names no sizes"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "names no sizes"),
        (RuntimeError(f"step 3 failed: RuntimeError: {MESSAGE}"), "64.0 MiB asked for"),
    ],
)
def test_errors_that_say_the_same_are_diagnosed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    """CUDA and its libraries raise other errors than PyTorch's allocator, and trainers wrap them."""
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_text("snapshot"))
    with pytest.warns(UserWarning) as told, pytest.raises(RuntimeError), planner.watch(tmp_path):
        raise error
    assert words in str(told[0].message)


def test_each_error_has_its_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that fail in the same second do not overwrite each other's file; a failed dump leaves none."""
    monkeypatch.setattr("planner.api.watch.time.strftime", lambda form: "20260101-000000")
    for rank in range(3):
        monkeypatch.setattr(
            torch.cuda.memory, "_dump_snapshot", lambda path, r=rank: Path(path).write_text(str(r))
        )
        with pytest.warns(UserWarning), pytest.raises(RuntimeError), planner.watch(tmp_path):
            raise torch.cuda.OutOfMemoryError(MESSAGE)

    def fails(path: str) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", fails)
    with pytest.warns(UserWarning, match="disk full"), pytest.raises(RuntimeError), planner.watch(tmp_path):
        raise torch.cuda.OutOfMemoryError(MESSAGE)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "out-of-memory-20260101-000000.pickle": "0",
        "out-of-memory-20260101-000000-2.pickle": "1",
        "out-of-memory-20260101-000000-3.pickle": "2",
    }


class Recorder:
    """The recording of allocations, as `torch.cuda.memory._record_memory_history` switches it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, is_on: bool) -> None:
        self.is_on, self.switches = is_on, list[str | None]()
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "init", lambda: None)
        monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: self.is_on, raising=False)
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", self.switch)

    def switch(self, enabled: str | None, **options: Any) -> None:
        """Record whether allocations are to be recorded."""
        self.is_on = enabled is not None
        self.switches.append(enabled)


def test_a_recording_of_the_program_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch stops only the recording that it started: neither the program's own nor an outer watch's."""
    recorder = Recorder(monkeypatch, is_on=True)
    with planner.watch(record=True):
        pass
    assert recorder.switches == []
    recorder = Recorder(monkeypatch, is_on=False)
    with planner.watch(record=True), planner.watch(record=True):
        pass
    assert recorder.switches == ["all", None]


def test_a_message_answers_if_its_request_is_not_in_the_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recording that another part of the program stopped has no events."""
    empty: dict[str, Any] = {"device_traces": [[]], "segments": []}
    monkeypatch.setattr(
        torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_bytes(pickle.dumps(empty))
    )
    Recorder(monkeypatch, is_on=False)
    raises = pytest.raises(RuntimeError)
    with pytest.warns(UserWarning) as told, raises, planner.watch(tmp_path, record=True):
        raise torch.cuda.OutOfMemoryError(MESSAGE)
    assert "64.0 MiB asked for" in str(told[0].message)
