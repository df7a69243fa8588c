"""The measurement of plain tensors in TensorFlow, against a library that counts as TensorFlow does."""

import sys
import weakref
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from calibration.probe.tensorflow import load_tensorflow, measure
from planner.cli import run
from planner.errors import ModelError, NoGpuError, UsageError
from planner.jobs import parse_tensor_spec
from planner.planning.process.model import (
    Define,
    Delete,
    EmptyCache,
    Heading,
    MemoryReading,
    Print,
    Process,
    ResetPeak,
)


class Tensor:
    """The result of `tf.constant`."""


@dataclass
class FakeTensorflow:
    """The part of TensorFlow that the probe calls, with a GPU that counts bytes."""

    gpus: tuple[str, ...] = ("the GPU",)
    growing: list[str] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    current: int = 0
    peak: int = 0
    __version__: str = "2.0-fake"

    @property
    def config(self) -> Any:
        experimental = SimpleNamespace(
            set_memory_growth=lambda gpu, on: self.growing.append(gpu) if on else None,
            reset_memory_stats=self._reset,
            get_memory_info=lambda gpu: {"current": self.current, "peak": self.peak},
        )
        return SimpleNamespace(
            experimental=experimental, list_physical_devices=lambda kind: self.gpus if kind == "GPU" else ()
        )

    def device(self, name: str) -> AbstractContextManager[None]:
        self.places.append(name)
        return nullcontext()

    def as_dtype(self, name: str) -> Any:
        return SimpleNamespace(as_numpy_dtype=np.dtype(name))

    def constant(self, array: np.ndarray[Any, Any]) -> Tensor:
        tensor = Tensor()
        self._count(array.nbytes)
        weakref.finalize(tensor, self._count, -array.nbytes)
        return tensor

    def _count(self, size_bytes: int) -> None:
        self.current += size_bytes
        self.peak = max(self.peak, self.current)

    def _reset(self, gpu: str) -> None:
        self.peak = self.current


def test_a_variable_is_measured_as_the_notebook_does() -> None:
    """Steps become calls of TensorFlow, on its GPU with growing memory, and its counters become readings."""
    tf = FakeTensorflow(current=100, peak=900)
    process: Process = (
        Heading("Tensor variable"),
        ResetPeak(),
        Print("Initial"),
        Define("x", parse_tensor_spec("256x4")),
        Define("y", parse_tensor_spec("3:int64")),
        Print("Define"),
        Delete(("x",)),
        Print("Delete"),
    )
    assert measure(process, tf) == (
        MemoryReading("Tensor variable", "Initial", 100, None, 100),
        MemoryReading("Tensor variable", "Define", 4220, None, 4220),
        MemoryReading("Tensor variable", "Delete", 124, None, 4220),
    )
    assert (tf.growing, tf.places) == (["the GPU"], ["GPU:0", "GPU:0"])


def test_without_a_gpu_nothing_is_measured() -> None:
    """The error names the missing GPU if TensorFlow sees none."""
    with pytest.raises(NoGpuError, match="TensorFlow sees no GPU"):
        measure((Print("Initial"),), FakeTensorflow(gpus=()))


def test_other_steps_are_refused() -> None:
    """A step that is not of plain tensors is refused before anything is done."""
    tf = FakeTensorflow()
    with pytest.raises(UsageError, match=r"steps\[1\]: TensorFlow is measured with plain tensors only"):
        measure((Define("x", parse_tensor_spec("8")), EmptyCache()), tf)
    assert (tf.growing, tf.peak) == ([], 0)


def test_without_tensorflow_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing TensorFlow is one line that says how to install it."""
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(
        ModelError, match=r"^tensorflow is not installed; .*'gpu-batch-planner\[tensorflow\]'$"
    ):
        load_tensorflow()


def test_the_command_prints_the_notebooks_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By default the notebook's variable is measured, and printed in the notebook's form for TensorFlow."""
    monkeypatch.setitem(sys.modules, "tensorflow", FakeTensorflow())
    assert run(["replay", "--framework", "tensorflow"]) == 0
    assert capsys.readouterr() == (
        "## Tensor variable\n"
        "Initial: current = 0.0 MiB, peak = 0.0MiB\n"
        "Define: current = 1024.0 MiB, peak = 1024.0MiB\n"
        "Delete: current = 0.0 MiB, peak = 1024.0MiB\n"
        "\n"
        "Assumed\n"
        "  - measured with TensorFlow 2.0-fake, memory growth enabled; nothing is simulated\n",
        "",
    )
