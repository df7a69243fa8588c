"""Answer inductor's queries about the GPU and Triton.

The answers are as on the planned GPU with Triton installed.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo.device_interface as interface
import torch.utils._triton
from torch._inductor import utils
from torch._inductor.kernel import mm
from torch._inductor.runtime import hints

from planner.capture.inductor.convolutions import backend_memory_format
from planner.capture.patching import always, patched
from planner.hardware.cudnn import describe_for_cudnn
from planner.program import Target

_CACHES = (  # inductor's caches, with values of the GPU for which they were first computed
    hints.DeviceProperties.create.__func__,  # type: ignore[attr-defined]
    utils.is_big_gpu,
    utils.get_max_num_sms,
    utils.using_b200,
    utils.get_device_tflops,
    utils.get_gpu_dram_gbps,
    mm._is_sm7x_or_older_gpu,
)
_BACKEND_HASH = "planner"  # replaces Triton's hash, which is part of the names of cached kernels
_NO_TRITON = utils.TritonAttrsDescriptorVersion.V0_NO_TRITON


def gpu_properties(target: Target) -> SimpleNamespace:
    """Return GPU properties for inductor: the target's per-SM limits, but fixed memory and L2 sizes.

    The names are torch.cuda's, and the limits are as on the emulated GPU.
    """
    described = describe_for_cudnn(target.capability, target.sm_count)
    major, minor = target.capability
    return SimpleNamespace(
        name="NVIDIA GPU",
        major=major,
        minor=minor,
        gcnArchName="",
        total_memory=described["totalGlobalMem"],
        multi_processor_count=target.sm_count,
        warp_size=described["warpSize"],
        regs_per_multiprocessor=described["maxRegistersPerSM"],
        max_threads_per_multi_processor=described["maxThreadsPerSM"],
        max_threads_per_block=described["maxThreadsPerBlock"],
        shared_memory_per_block=described["maxSharedMemoryPerBlock"],
        shared_memory_per_block_optin=described["maxSharedMemoryPerBlockOptin"],
        shared_memory_per_multiprocessor=described["maxSharedMemoryPerBlockOptin"]
        + described["reservedSharedMemoryPerBlock"],
        L2_cache_size=described["l2CacheSize"],
    )


@contextmanager
def gpu_of_inductor(target: Target) -> Iterator[None]:
    """Answer queries of torch.cuda, dynamo and inductor as on `target` with Triton, inside the context."""
    properties = gpu_properties(target)
    major, minor = target.capability
    answers: list[tuple[Any, str, Any]] = [
        (torch.cuda, "get_device_properties", properties),
        (torch.cuda, "get_device_capability", (major, minor)),
        (torch.utils._triton, "triton_hash_with_backend", _BACKEND_HASH),
        (torch.cuda, "is_bf16_supported", True),  # GPUs without bfloat16 emulate it
        (torch.cuda.amp.common, "amp_definitely_not_available", False),
        *_where_imported("has_triton", True),
        # Stand-ins for Triton, which user files may import, must not affect the generated code.
        *_where_imported("get_triton_attrs_descriptor_version", _NO_TRITON),
    ]
    for holder in (interface.CudaInterface, interface.CudaInterface.Worker):
        answers.append((holder, "get_device_properties", properties))
    for name, value in (
        ("is_available", True), ("get_compute_capability", 10 * major + minor), ("current_device", 0),
        ("device_count", 1), ("raise_if_triton_unavailable", None), ("is_bf16_supported", major >= 8),
        ("is_triton_capable", major >= 7),
    ):  # fmt: skip
        answers.append((interface.CudaInterface, name, value))
    with ExitStack() as stack:
        for holder, name, value in answers:
            answer = always(value)
            method = staticmethod(answer) if isinstance(holder, type) else answer
            stack.enter_context(patched(holder, name, method))
        stack.enter_context(patched(torch._C, "_select_conv_backend", always("cudnn")))
        stack.enter_context(patched(torch._C, "_conv_determine_backend_memory_format", backend_memory_format))
        _clear_caches()
        stack.callback(_clear_caches)
        yield


def _clear_caches() -> None:
    for cache in _CACHES:
        cache.cache_clear()


def _where_imported(name: str, value: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yield (module, name, value) for each module of inductor that imported the function `name`."""
    for path, module in sys.modules.copy().items():
        if path.startswith("torch._inductor") and callable(vars(module).get(name)):
            yield module, name, value
