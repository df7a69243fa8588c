"""Readings of the GPU by a probe, through a made-up CUDA and NVML."""

import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import calibration.probe.run
from calibration.probe.__main__ import _set_cap, observe
from calibration.probe.client import ProbeRequest
from calibration.probe.gauge import nvml_handle, own_bytes
from planner._support.versions import format_cudnn_version
from planner.allocator.config import MIB
from planner.allocator.history.file import load_history
from planner.hardware.calibration.model import Observation, Settings, Versions
from planner.jobs import Job
from planner.program.events import Phase
from tests.helpers.probes import training


class FakeNvml(ModuleType):
    """An NVML whose device holds 500 MiB of others; this process is shown or not."""

    def __init__(self, shown: bool) -> None:
        super().__init__("pynvml")
        self.shown = shown
        self.now = 0  # before the context exists

    def nvmlInit(self) -> None:  # noqa: N802
        pass

    def nvmlSystemGetDriverVersion(self) -> bytes:  # noqa: N802
        return b"580.65"

    def nvmlDeviceGetHandleByIndex(self, index: int) -> object:  # noqa: N802
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: object) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(used=(500 + self.now) * MIB, total=12_288 * MIB)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: object) -> list[SimpleNamespace]:  # noqa: N802
        pid = os.getpid() if self.shown else 1
        return [SimpleNamespace(pid=pid, usedGpuMemory=self.now * MIB)]


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A torch that believes in a GPU of 12,037 MiB on which the steps end with 500 MiB reserved."""
    entries = [
        {"action": "segment_alloc", "addr": 2**32, "size": 2 * MIB, "stream": 0},
        {"action": "alloc", "addr": 2**32, "size": 4096, "stream": 0},
        {"action": "segment_alloc", "addr": 2**34, "size": 2 * MIB, "stream": 900},
        {"action": "segment_alloc", "addr": 2**33, "size": 2 * MIB, "stream": 800},
        {"action": "oom", "size": 4 * MIB, "stream": 800, "device_free": 3 * MIB},
        {"action": "snapshot", "stream": 0},
    ]
    stats = {
        "allocated_bytes.all.peak": 450 * MIB,
        "reserved_bytes.all.peak": 600 * MIB,
        "num_alloc_retries": 2,
        "allocation.all.allocated": 1,
    }
    card = SimpleNamespace(major=8, minor=6, total_memory=12_037 * MIB)
    monkeypatch.setattr(os, "environ", {**os.environ, "CUDA_VISIBLE_DEVICES": "0"})
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **_: None)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"device_traces": [entries]})
    for name, value in {
        "is_available": True,
        "init": None,
        "synchronize": None,
        "get_device_properties": card,
        "get_device_name": "NVIDIA GeForce RTX 3060",
        "set_per_process_memory_fraction": None,
        "memory_stats": stats,
        "memory_reserved": 500 * MIB,
        "memory_allocated": 80 * MIB,
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=value: answer)
    return monkeypatch


@pytest.mark.parametrize(
    ("shown", "about"),
    [(True, ""), (False, "process memory: the device's used memory less its level before")],
)
def test_all_figures_of_a_run_arrive(
    fake_cuda: pytest.MonkeyPatch, tmp_path: Path, shown: bool, about: str
) -> None:
    """Levels, peaks, versions and settings arrive, with NVML for the process or only for the device."""
    nvml = FakeNvml(shown)
    fake_cuda.setitem(sys.modules, "pynvml", nvml)
    fake_cuda.setattr(torch.cuda, "synchronize", lambda *_: setattr(nvml, "now", max(nvml.now, 300)))

    def steps(job: Job, batch: int, device: str, on_phase: Any) -> None:
        assert device == "cuda"
        for phase, level in ((Phase.FORWARD, 1_100), (Phase.OPTIMIZER, 920), (Phase.END, 920)):
            nvml.now = level
            on_phase(3, phase)

    fake_cuda.setattr(calibration.probe.run, "run_real", steps)
    path = tmp_path / "run.history.json.gz"
    conf = "max_split_size_mb:64"
    job = training(cudnn_benchmark=True, cublas_workspace_config=":16:8")
    seen = observe(ProbeRequest(job, 4, 6_000 * MIB, conf, history=path))
    assert torch.backends.cudnn.benchmark
    assert seen == Observation(
        job=job,
        batch=4,
        gpu="NVIDIA GeForce RTX 3060",
        versions=Versions(torch.__version__, "13.0", "9.10.2", "580.65", (8, 6), 12_037 * MIB, 12_288 * MIB),
        settings=Settings(alloc_conf=conf, allocator_cap_bytes=6_000 * MIB),
        peak_allocated_bytes=450 * MIB,
        peak_reserved_bytes=600 * MIB,
        end_allocated_bytes=80 * MIB,
        process_peak_bytes=1_100 * MIB,
        context_before_bytes=300 * MIB,
        context_after_bytes=420 * MIB,
        retries=2,
        oom=False,
        source="measured",
        about=about,
        when=seen.when,
    )
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == os.environ["PYTORCH_ALLOC_CONF"] == conf
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    history = load_history(path)
    assert [(event.action, event.address, event.stream) for event in history.events] == [
        *(("segment_alloc", 2**32, 0), ("alloc", 2**32, 0), ("segment_alloc", 2**34, 2)),
        *(("segment_alloc", 2**33, 1), ("oom", 3 * MIB, 1), ("snapshot", 0, 0)),
    ]
    assert (history.alloc_conf, history.limit_bytes) == (conf, int(6_000 / 12_037 * (12_037 * MIB)))
    assert [mark.phase for mark in history.marks] == [Phase.FORWARD, Phase.OPTIMIZER, Phase.END]


def test_a_death_for_want_of_memory_is_observed(fake_cuda: pytest.MonkeyPatch) -> None:
    """The peaks until then are read, what comes after the last step is not; without NVML no process."""

    def dies(job: Job, batch: int, device: str, on_phase: Any) -> None:
        on_phase(1, Phase.FORWARD)
        raise torch.OutOfMemoryError("CUDA out of memory")

    fake_cuda.setitem(sys.modules, "pynvml", None)
    fake_cuda.setattr(calibration.probe.run, "run_real", dies)
    seen = observe(ProbeRequest(training(), 4))
    assert (seen.oom, seen.peak_reserved_bytes, seen.end_allocated_bytes) == (True, 600 * MIB, None)
    assert (seen.process_peak_bytes, seen.context_before_bytes, seen.versions.driver) == (None, None, None)


def test_a_cap_is_a_fraction_of_what_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cap becomes torch's fraction, the limit what torch makes of it; from the total on there is none."""
    fractions: list[float] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", fractions.append)
    assert _set_cap(6_000 * MIB, 12_000 * MIB) == 6_000 * MIB
    assert (_set_cap(None, 12_000 * MIB), _set_cap(12_000 * MIB, 12_000 * MIB)) == (None, None)
    assert fractions == [0.5]


def test_nvml_is_read_for_the_card_and_the_process_that_torch_uses() -> None:
    """The first visible GPU counts, by number or by name; of its processes only this one."""

    class Nvml:
        def nvmlDeviceGetHandleByIndex(self, index: int) -> object:  # noqa: N802
            return index

        def nvmlDeviceGetHandleByUUID(self, name: str) -> object:  # noqa: N802
            return name

        def nvmlDeviceGetComputeRunningProcesses(self, handle: object) -> list[object]:  # noqa: N802
            return [type("Process", (), {"pid": pid, "usedGpuMemory": used})() for pid, used in self.running]

        running: list[tuple[int, int | None]] = [(1, 5)]

    nvml = Nvml()
    assert [nvml_handle(nvml, text) for text in ("", "2,0", "GPU-ab,GPU-cd")] == [0, 2, "GPU-ab"]
    assert own_bytes(nvml, 0) is None
    nvml.running = [(1, 5), (os.getpid(), 9)]
    assert own_bytes(nvml, 0) == 9
    nvml.running = [(os.getpid(), None)]
    assert own_bytes(nvml, 0) is None


@pytest.mark.parametrize(
    ("number", "text"), [(8902, "8.9.2"), (90100, "9.1.0"), (91002, "9.10.2"), (None, None)]
)
def test_cudnn_versions_read_as_people_write_them(number: int | None, text: str | None) -> None:
    """cuDNN counts thousands before version 9 and ten thousands from then on."""
    assert format_cudnn_version(number) == text
