"""Measure the memory of one job at one batch size in a fresh process.

`python -m calibration.probe` is a worker of `planner._support.worker`, and `calibration.probe.client` sends
it one request. Nothing is timed. Running out of memory is a result, not an error.

The process samples its own memory by NVML. If NVML does not show the process (in virtual machines, and in
containers that have their own process numbers), its memory is the device's used memory minus the level before
the process had a context; no other process may use the GPU in that case.
"""

import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from msgspec import to_builtins
from msgspec.structs import replace

from calibration.observations import observation_to_json, read_job
from calibration.probe.client import ProbeRequest
from calibration.probe.gauge import detect_gpu, open_gauge
from planner._support.worker import serve
from planner.allocator.history import MOST_EVENTS, History
from planner.errors import ModelError, NoGpuError, PlannerError
from planner.hardware.calibration import Observation, Settings, Versions, origin_of
from planner.program import Phase

FAILURE = "the probe fails: {}"
NO_GPU = "no NVIDIA GPU is usable here: {}; measure on a machine with one, then plan from its calibrations"


def main() -> None:
    """Answer requests until standard input ends, then exit without CUDA's tear-down."""
    serve(lambda message, _: answer(message), FAILURE)
    sys.stderr.flush()
    os._exit(0)  # skips CUDA's tear-down, which takes long


def answer(message: dict[str, Any]) -> dict[str, Any]:
    """Answer a request: return the `DetectedGpu`, or the `Observation` of a job's run, as JSON data."""
    if message.pop("ask") == "gpu":
        _prepare("", "", "cuda")
        detected: dict[str, Any] = to_builtins(detect_gpu(open_gauge()))
        return detected
    history = message["history"] and Path(message["history"])
    fields = message | {"job": read_job(message["job"]), "history": history}
    return observation_to_json(observe(ProbeRequest(**fields)))


def observe(request: ProbeRequest) -> Observation:
    """Run a request in this process, and return the observation.

    The process must be fresh. Raises as `measure` does.
    """
    _prepare(request.alloc_conf, request.job.environment.cublas_workspace_config, request.device)
    if request.device == "cpu":
        return _observe_on_cpu(request)
    import torch

    from calibration.probe.memory_sampler import CudaRun, save_recorded_history

    gauge = open_gauge()
    torch.cuda.init()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()  # makes the context
    torch.backends.cudnn.benchmark = request.job.environment.cudnn_benchmark
    gpu = detect_gpu(gauge)
    versions, cap_bytes = gpu.versions, request.allocator_cap_bytes
    settings = replace(gpu.settings, alloc_conf=request.alloc_conf, allocator_cap_bytes=cap_bytes)
    limit_bytes = _set_cap(cap_bytes, versions.torch_total_bytes or 0)
    run = CudaRun(gauge.level if gauge else lambda: None)
    run.sample()
    context_before_bytes = run.highest_bytes
    if request.history is not None:
        torch.cuda.memory._record_memory_history(context=None, max_entries=MOST_EVENTS)
    with run.sampling():
        oom = _run_until_oom(request, run.on_phase)
    stats = torch.cuda.memory_stats()
    remarks = [gauge.remark] if gauge and gauge.remark else []
    if request.history is not None:
        about, marks = (gpu.name, versions.torch, request.alloc_conf), tuple(run.marks)
        history = History(*about, versions.torch_total_bytes, limit_bytes, (), marks)
        remarks += save_recorded_history(request.history, history)
    return Observation(
        job=request.job,
        batch=request.batch,
        gpu=gpu.name,
        versions=versions,
        settings=settings,
        peak_allocated_bytes=stats["allocated_bytes.all.peak"],
        peak_reserved_bytes=stats["reserved_bytes.all.peak"],
        end_allocated_bytes=run.end_allocated_bytes,
        process_peak_bytes=run.highest_bytes,
        context_before_bytes=context_before_bytes,
        context_after_bytes=run.context_after_bytes,
        retries=stats["num_alloc_retries"],
        oom=oom,
        source=origin_of(gpu.name),
        about="; ".join(remarks),
        when=_today(),
    )


def _prepare(alloc_conf: str, cublas_config: str, device: str) -> None:
    """Set the environment variables that torch reads, and check that a GPU is usable if one is needed.

    Raises NoGpuError.
    """
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # the order in which NVML counts the GPUs
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for name, text in (
        ("PYTORCH_CUDA_ALLOC_CONF", alloc_conf),  # until torch 2.9
        ("PYTORCH_ALLOC_CONF", alloc_conf),
        ("CUBLAS_WORKSPACE_CONFIG", cublas_config),
    ):
        os.environ.pop(name, None)
        if text:
            os.environ[name] = text
    if device == "cpu":
        return
    import torch

    if torch.version.cuda is None:
        raise NoGpuError(NO_GPU.format(f"torch {torch.__version__} is built without CUDA"))
    if not torch.cuda.is_available():
        raise NoGpuError(NO_GPU.format("torch finds none"))


def _set_cap(cap_bytes: int | None, total_bytes: int) -> int | None:
    """Limit the allocator to a cap, and return the limit in bytes, or None if no limit is set.

    The limit is rounded as torch rounds it. Returns None, and sets no limit, if there is no cap or the cap is
    not below the GPU's memory.
    """
    import torch

    if cap_bytes is None or cap_bytes >= total_bytes:
        return None
    fraction = cap_bytes / total_bytes
    torch.cuda.set_per_process_memory_fraction(fraction)
    return int(fraction * total_bytes)


def _run_until_oom(request: ProbeRequest, on_phase: Callable[[int, Phase], None]) -> bool:
    """Run the steps, and return whether GPU memory ran out. Raises ModelError for other failures."""
    import torch

    from calibration.probe.memory_sampler import OUT_OF_MEMORY
    from calibration.probe.run import run_real

    try:
        run_real(request.job, request.batch, request.device, on_phase)
        if request.device != "cpu":
            torch.cuda.synchronize()
    except PlannerError:
        raise
    except MemoryError as error:
        raise ModelError(
            f"{request.job.model.name}: the host's memory runs out at batch {request.batch}"
        ) from error
    except RuntimeError as error:
        if request.device != "cpu" and OUT_OF_MEMORY.search(str(error)):
            return True
        text = " ".join(str(error).split())[:200]
        raise ModelError(f"{request.job.model.name}: fails at batch {request.batch}: {text}") from error
    return False


def _observe_on_cpu(request: ProbeRequest) -> Observation:
    import torch

    _run_until_oom(request, lambda step, phase: None)
    versions = Versions(str(torch.__version__), None, None, None, (0, 0), None, None)
    about = "on the CPU: nothing was measured"
    run = (request.job, request.batch, "cpu", versions, Settings())
    return Observation(*run, oom=False, source="measured", about=about, when=_today())


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


if __name__ == "__main__":
    main()
