"""A probe in a process of its own: what goes wrong in it, and what arrives."""

from pathlib import Path

import pytest
import torch

import calibration.probe.run
from calibration.probe.__main__ import _run_until_oom
from calibration.probe.client import ProbeRequest, find_gpu, measure
from calibration.probe.memory_sampler import CudaRun
from planner.allocator.config import MIB
from planner.errors import ModelError, NoGpuError, UsageError
from planner.jobs import Mode
from planner.jobs.files.catalogue import load_catalogue
from planner.program.events import Phase
from tests.helpers.models import job_of
from tests.helpers.probes import training


@pytest.mark.slow
def test_a_fresh_process_runs_the_steps() -> None:
    """On the CPU all goes as on a GPU, and every figure that only a GPU has is None."""
    job = load_catalogue()["conv_pair"].job
    observation = measure(ProbeRequest(job, 4, device="cpu"))
    assert (observation.job, observation.batch, observation.oom) == (job, 4, False)
    assert (observation.peak_reserved_bytes, observation.process_peak_bytes) == (None, None)


@pytest.mark.slow
def test_without_a_gpu_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A query of the GPU, or a run on it, raises NoGpuError, whose exit code is 5."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    job = load_catalogue()["conv_pair"].job
    for call in (find_gpu, lambda: measure(ProbeRequest(job, 4))):
        with pytest.raises(NoGpuError, match=r"^no NVIDIA GPU is usable here: torch .*") as error:
            call()
        assert error.value.exit_code == 5 and "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        ("print('{}')\nfrom torch import nn\nmake = lambda: nn.Flatten(0)", None, ""),
        (
            "import os\nmake = lambda: os._exit(7)",
            ModelError,
            "a probe died with code 7, its last words: nothing",
        ),
        ("make = lambda: 3", ModelError, "gives an int, not an nn.Module; name a callable that returns one"),
        ("make = lambda: [][1]", ModelError, "its constructor fails: IndexError: list index out of range"),
        ("made = 1", UsageError, "net.py has no model 'make'"),
        (
            "from torch import nn\nmake = lambda: nn.Linear(5, 5)",
            ModelError,
            "fails at batch 2: mat1 and mat2 shapes cannot be multiplied",
        ),
    ],
)
def test_errors_in_the_process_are_raised_outside(
    tmp_path: Path, code: str, kind: type[Exception] | None, words: str
) -> None:
    """Errors keep their class and words across the process, prints do not disturb, a death is an error."""
    file = tmp_path / "net.py"
    file.write_text(code)
    job = job_of("3", model=f"{file}:make", mode=Mode.INFER)
    if kind is None:
        assert measure(ProbeRequest(job, 2, device="cpu")).batch == 2
        return
    with pytest.raises(kind) as error:
        measure(ProbeRequest(job, 2, device="cpu"))
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("GET was unable to find an engine to execute this computation"),
        RuntimeError("CUDA error: out of memory"),
    ],
)
def test_no_memory_is_a_value(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """An out-of-memory error of CUDA, cuDNN or cuBLAS is a result of the probe, which raises nothing."""

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(calibration.probe.run, "run_real", fail)
    assert _run_until_oom(ProbeRequest(training(), 2), lambda step, phase: None)


def test_another_failure_is_none_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A RuntimeError that does not speak of memory is the model's."""

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered\nmore")

    monkeypatch.setattr(calibration.probe.run, "run_real", fail)
    with pytest.raises(
        ModelError, match=r"test: fails at batch 2: CUDA error: device-side assert triggered more"
    ):
        _run_until_oom(ProbeRequest(training(), 2), lambda step, phase: None)


def test_the_context_is_read_at_the_end_and_the_peak_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The highest level counts for the process; the level at the end less what torch reserves is context."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"allocation.all.allocated": 7})
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 500 * MIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 80 * MIB)
    levels = iter([300, 1200, 900, 900])
    run = CudaRun(lambda: next(levels) * MIB)
    run.sample()
    run.on_phase(1, Phase.FORWARD)
    run.on_phase(3, Phase.END)
    assert (run.highest_bytes, run.context_after_bytes) == (1200 * MIB, 400 * MIB)
    assert run.end_allocated_bytes == 80 * MIB
    assert run.marks == [(7, 1, Phase.FORWARD), (7, 3, Phase.END)]


def test_a_loop_too_short_to_load_all_kernels_has_no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """After fewer than three steps, or without NVML, the later context is not known, and is None."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_stats", dict)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
    for level, steps in ((lambda: 5, 2), (lambda: None, 3)):
        run = CudaRun(level)
        run.on_phase(steps, Phase.END)
        assert run.context_after_bytes is None
