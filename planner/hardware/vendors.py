"""State the limits of plans for GPUs from makers other than NVIDIA.

Torch's allocator is the same code under ROCm (c10/cuda, hipified) and has the same size classes on XPU
(c10/xpu/XPUCachingAllocator.cpp). The memory of libraries differs, so these answers have the widest margins
of all kinds and no probability. Apple's GPUs are refused, since Metal's allocator has its own heaps.
"""

import re
from collections.abc import Mapping

from planner.errors import UsageError
from planner.hardware.device import Vendor

# Ends of a sentence, as `likeness.unlike` has them.
PLATFORMS: Mapping[Vendor, str] = {Vendor.AMD: "runs under ROCm", Vendor.INTEL: "runs on XPU"}
# 76 MiB: parseCUDABlasLtWorkspaceSize of ATen/cuda/CublasHandlePool.cpp under USE_ROCM. Blocks of 4 GiB:
# intel/intel-extension-for-pytorch issues 846 and 863.
_INSTEAD = (
    "CUDA's libraries on an A100 are used in their place, with the widest margins of all, and no probability "
    "is given"
)
NOT_MODELLED: Mapping[Vendor, str] = {
    Vendor.AMD: (
        "under ROCm torch's caching allocator is the same; not modelled are workspaces of MIOpen, rocBLAS "
        f"and hipBLASLt (76 MiB a handle), attention kernels and RCCL: {_INSTEAD}"
    ),
    Vendor.INTEL: (
        "on XPU torch's caching allocator has the size classes of CUDA's; not modelled are workspaces of "
        "oneDNN and oneMKL, attention kernels, and that an Arc of the A series refuses blocks of 4 GiB: "
        f"{_INSTEAD}"
    ),
}
_APPLE = re.compile(r"(apple)?m[1-9](pro|max|ultra)?(\d+gb)?|(apple)?mps|(apple)?metal")


def refuse_apple(key: str) -> None:
    """Raise UsageError if a GPU's `device_key` names a GPU of Apple."""
    if _APPLE.fullmatch(key):
        raise UsageError(
            "Apple's GPUs are not planned: torch's MPS allocator takes memory in heaps of Metal, shared with "
            "the rest of the machine; docs/devices.md says more"
        )
