"""The probe: it runs the loop that is traced, and what it meets becomes a value or one line."""

import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import calibration.probe.run
from calibration.observations import observation_from_json, observation_to_json
from calibration.probe.__main__ import _nvml_handle, _own_bytes, _run_until_oom, _set_cap, observe
from calibration.probe.client import ProbeRequest, find_gpu, measure
from calibration.probe.memory_sampler import CudaRun
from calibration.probe.run import build_real_model, host_batch, run_real
from planner._support.versions import format_cudnn_version
from planner.allocator.config import MIB
from planner.allocator.history.file import load_history
from planner.capture.loop.batches import empty_batch
from planner.capture.loop.optimizers import build_optimizer
from planner.capture.loop.runtime import LoopRuntime
from planner.capture.loop.training_loop import run_loop
from planner.errors import ModelError, NoGpuError, UsageError
from planner.hardware.calibration.observation import Observation, Settings, Versions
from planner.jobs import Job, Loss, Mode, Optimizer, ZeroGrad, parse_tensor_spec
from planner.jobs.catalogue import load_catalogue
from planner.program.events import Alloc, Phase, PhaseStart
from tests.helpers.models import AMPERE, job_of, trace_of
from tests.helpers.runs import RUN
from tests.helpers.structs import replace


def tiny() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))


def training(**fields: object) -> Job:
    target = parse_tensor_spec("scalar:int64")
    job = job_of("3x8x8", mode=Mode.TRAIN, steps=3, loss=Loss.CROSS_ENTROPY, target=target)
    return replace(job, **fields)  # type: ignore[arg-type]


class Listener(TorchDispatchMode):  # type: ignore[misc]
    """Writes down the loop's phases and, in all but the copy of the batch, the operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.heard: list[str] = []
        self.phase = Phase.SETUP

    def on_phase(self, step: int, phase: Phase) -> None:
        self.phase = phase
        self.heard.append(f"{step} {phase}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.phase not in (Phase.SETUP, Phase.INPUTS):
            self.heard.append(str(func))
        return func(*args, **(kwargs or {}))


def heard_on_cpu(job: Job) -> list[str]:
    listener = Listener()
    with listener:
        run_real(job, 4, "cpu", listener.on_phase, lambda _: tiny())
    return listener.heard[1:]  # what follows the set-up


def heard_on_meta(job: Job) -> list[str]:
    with torch.device("meta"):
        model = tiny()
    listener = Listener()
    optimizer = None
    if job.mode is Mode.TRAIN:
        optimizer = build_optimizer(job.optimizer, job.optimizer_impl, model.parameters())
    with listener:
        run_loop(model, job, lambda: empty_batch(job, 4, "meta"), optimizer, listener.on_phase, LoopRuntime())
    return listener.heard


@pytest.mark.parametrize(
    "job",
    [
        training(),
        training(optimizer=Optimizer.MOMENTUM, zero_grad=ZeroGrad.AFTER_STEP, steps=4),
        training(zero_grad=ZeroGrad.BEFORE_BACKWARD, keep_grads=True),
        training(mode=Mode.INFER, target=None),
        training(mode=Mode.FORWARD, target=None, steps=1),
    ],
    ids=lambda job: f"{job.mode}-{job.optimizer}-{job.zero_grad}",
)
def test_real_tensors_run_the_very_loop_that_is_traced(job: Job) -> None:
    """Phases and operators come in the same order with real tensors on a device and with none on meta."""
    on_cpu = heard_on_cpu(job)
    assert on_cpu == heard_on_meta(job)
    assert sum(line.endswith("forward") and line[0].isdecimal() for line in on_cpu) == job.steps


def test_real_tensors_pass_the_marks_of_the_recorded_trace() -> None:
    """The recorder's marks are the phases of the run with real tensors, and its sizes those of that run."""
    job = training()
    marks: list[PhaseStart] = []
    run_real(job, 4, "cpu", lambda step, phase: marks.append(PhaseStart(step, phase)), lambda _: tiny())
    trace = trace_of(tiny, job, 4, AMPERE)
    assert [event for event in trace.events if isinstance(event, PhaseStart)] == marks
    born = [event.size_bytes for event in trace.events if isinstance(event, Alloc)]
    placed = [tensor.nbytes for child in tiny() for tensor in child.parameters()]
    copied = [
        tensor.nbytes for tensor in (*host_batch(job, 4)[0], host_batch(job, 4)[2]) if tensor is not None
    ]
    assert born[: len(placed) + len(copied)] == placed + copied


def test_a_batch_on_the_host_has_the_shapes_of_the_traced_one_and_valid_values() -> None:
    """Whole numbers are 0 save in masks, which let all through; targets are probabilities."""
    job = training(
        inputs=tuple(map(parse_tensor_spec, ("3x8x8", "input_ids=6:int64", "attention_mask=6:int64"))),
        target=parse_tensor_spec("5"),
    )
    args, kwargs, target = host_batch(job, 4)
    like_args, like_kwargs, like_target = empty_batch(job, 4, "meta")
    assert [(x.shape, x.dtype) for x in (*args, *kwargs.values())] == [
        (x.shape, x.dtype) for x in (*like_args, *like_kwargs.values())
    ]
    assert target is not None and like_target is not None and target.shape == like_target.shape
    assert (kwargs["input_ids"].unique().tolist(), kwargs["attention_mask"].unique().tolist()) == ([0], [1])
    assert 0 <= float(target.min()) <= float(target.max()) <= 1
    assert host_batch(replace(job, mode=Mode.INFER), 4)[2] is None


def test_a_real_model_has_the_values_of_its_constructor() -> None:
    """Nothing of the model is on meta, and its tables of indices are filled."""
    model = build_real_model(Job("torchvision:swin_t", inputs=(parse_tensor_spec("3x224x224"),)))
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cpu"}
    tables = [buffer for name, buffer in model.named_buffers() if "index" in name]
    assert tables and all(int(table.max()) == 168 for table in tables)


def test_a_fresh_process_runs_the_steps() -> None:
    """On the CPU all goes as on a GPU, and every figure that only a GPU has is None."""
    job = load_catalogue()["conv_pair"].job
    observation = measure(ProbeRequest(job, 4, device="cpu"))
    assert (observation.job, observation.batch, observation.oom) == (job, 4, False)
    assert (observation.peak_reserved_bytes, observation.process_peak_bytes) == (None, None)


def test_without_a_gpu_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking for the GPU, or for a run on it, raises NoGpuError, whose exit code is 5."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    job = load_catalogue()["conv_pair"].job
    for ask in (find_gpu, lambda: measure(ProbeRequest(job, 4))):
        with pytest.raises(NoGpuError, match=r"^no NVIDIA GPU is usable here: torch .*") as error:
            ask()
        assert error.value.exit_code == 5 and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        ("print('{}')\nfrom torch import nn\nmake = lambda: nn.Flatten(0)", None, ""),
        (
            "import os\nmake = lambda: os._exit(7)",
            ModelError,
            "a probe died with code 7, its last words: nothing",
        ),
        ("make = lambda: 3", ModelError, "gives a int, not an nn.Module; name another callable"),
        ("make = lambda: [][1]", ModelError, "its constructor fails: IndexError: list index out of range"),
        ("made = 1", UsageError, "net.py has no model 'make'"),
        (
            "from torch import nn\nmake = lambda: nn.Linear(5, 5)",
            ModelError,
            "fails at batch 2: mat1 and mat2 shapes cannot be multiplied",
        ),
    ],
)
def test_what_goes_wrong_in_the_process_is_told_outside(
    tmp_path: Path, code: str, kind: type[Exception] | None, words: str
) -> None:
    """Errors keep their class and words across the process, prints do not disturb, a death is told."""
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
    """However CUDA, cuDNN and cuBLAS say that memory ran out, the probe says so too and raises nothing."""

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


def test_a_loop_too_short_to_load_all_kernels_tells_no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """After fewer than three steps, or without NVML, the later context is not known, and is None."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_stats", dict)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
    for level, steps in ((lambda: 5, 2), (lambda: None, 3)):
        run = CudaRun(level)
        run.on_phase(steps, Phase.END)
        assert run.context_after_bytes is None


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
    """Whether NVML shows the process or only the device: levels, peaks, versions and settings are told."""
    nvml = FakeNvml(shown)
    fake_cuda.setitem(sys.modules, "pynvml", nvml)
    fake_cuda.setattr(torch.cuda, "synchronize", lambda: setattr(nvml, "now", max(nvml.now, 300)))

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
    assert [event.action for event in history.events] == ["segment_alloc", "alloc", "snapshot"]
    assert (history.alloc_conf, history.limit_bytes) == (conf, int(6_000 / 12_037 * (12_037 * MIB)))
    assert [mark.phase for mark in history.marks] == [Phase.FORWARD, Phase.OPTIMIZER, Phase.END]


def test_a_death_for_want_of_memory_is_observed(fake_cuda: pytest.MonkeyPatch) -> None:
    """The peaks until then are told, what comes after the last step is not; without NVML no process."""

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
    told: list[float] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", told.append)
    assert _set_cap(6_000 * MIB, 12_000 * MIB) == 6_000 * MIB
    assert (_set_cap(None, 12_000 * MIB), _set_cap(12_000 * MIB, 12_000 * MIB)) == (None, None)
    assert told == [0.5]


def test_nvml_is_asked_for_the_card_and_the_process_that_torch_uses() -> None:
    """The first visible card counts, by number or by name; of its processes only this one."""

    class Nvml:
        def nvmlDeviceGetHandleByIndex(self, index: int) -> object:  # noqa: N802
            return index

        def nvmlDeviceGetHandleByUUID(self, name: str) -> object:  # noqa: N802
            return name

        def nvmlDeviceGetComputeRunningProcesses(self, handle: object) -> list[object]:  # noqa: N802
            return [type("Process", (), {"pid": pid, "usedGpuMemory": used})() for pid, used in self.running]

        running: list[tuple[int, int | None]] = [(1, 5)]

    nvml = Nvml()
    assert [_nvml_handle(nvml, text) for text in ("", "2,0", "GPU-ab,GPU-cd")] == [0, 2, "GPU-ab"]
    assert _own_bytes(nvml, 0) is None
    nvml.running = [(1, 5), (os.getpid(), 9)]
    assert _own_bytes(nvml, 0) == 9
    nvml.running = [(os.getpid(), None)]
    assert _own_bytes(nvml, 0) is None


@pytest.mark.parametrize(
    ("number", "text"), [(8902, "8.9.2"), (90100, "9.1.0"), (91002, "9.10.2"), (None, None)]
)
def test_cudnn_versions_read_as_people_write_them(number: int | None, text: str | None) -> None:
    """cuDNN counts thousands before version 9 and ten thousands from then on."""
    assert format_cudnn_version(number) == text


def test_an_observation_survives_json() -> None:
    """What a probe answers is read back as the same observation."""
    for one in (
        RUN,
        replace(RUN, oom=True, end_allocated_bytes=None, versions=replace(RUN.versions, cuda=None)),
    ):
        assert observation_from_json(json.loads(json.dumps(observation_to_json(one)))) == one


@pytest.mark.parametrize("said", [True, False])
def test_older_runs_say_of_their_settings_what_is_said_of_jobs(said: bool) -> None:
    """cuDNN's benchmark mode stood among the settings of a run."""
    older = observation_to_json(RUN)
    older["settings"]["cudnn_benchmark"] = said
    assert observation_from_json(older) == replace(RUN, job=replace(RUN.job, cudnn_benchmark=said))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("batch", "32", "batch: expected a whole number of at least 1, got '32'"),
        ("batch", True, "batch: expected a whole number of at least 1, got true"),
        ("oom", 0, "oom: expected true or false, got 0"),
        ("retries", 1.5, "retries: expected a whole number of at least 0 or null, got 1.5"),
        ("source", "guessed", "source: expected one of emulated, measured, published, got 'guessed'"),
        ("extra", 1, "extra: unknown key"),
        ("job", {"model": "x"}, "job: KeyError: 'source'"),
        ("versions", {}, "versions: missing torch"),
        ("settings", None, "settings: expected keys with values, got null"),
        ("settings", {"cudnn_benchmark": 1}, "expected true or false, got 1"),
    ],
)
def test_an_answer_that_no_probe_gives_is_refused(key: str, value: object, words: str) -> None:
    """A wrong type, an unknown key or a part that is missing is named."""
    with pytest.raises(ValueError) as error:
        observation_from_json(observation_to_json(RUN) | {key: value})
    assert words in str(error.value)
