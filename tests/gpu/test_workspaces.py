"""Workspaces that cuDNN answers without a GPU, against those that it takes on one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from planner.capture.workspaces.ops import KernelOp, Output, answer_convolutions
from planner.capture.workspaces.registry import RULES
from planner.emulator.compiled import open_cudnn_with_cublaslt
from planner.hardware.cudnn.client import Cudnn
from planner.program.kernels.expansion import OpKind
from planner.program.target import Target
from planner.program.torch_version import torch_version_of

pytestmark = pytest.mark.gpu

aten = torch.ops.aten
CASES = [  # channels, extent, kernel, stride, groups, dimensions
    (64, 56, 3, 1, 1, 2),
    (256, 14, 3, 1, 1, 2),
    (320, 7, 1, 1, 1, 2),
    (128, 28, 3, 2, 1, 2),
    (96, 28, 7, 1, 96, 2),
    (128, 28, 3, 1, 32, 2),
    (16, 24, 3, 1, 1, 3),
]


@pytest.fixture(scope="module")
def library() -> Cudnn:
    """The very library that torch runs."""
    functional.conv2d(torch.zeros(1, 1, 4, 4, device="cuda"), torch.zeros(1, 1, 3, 3, device="cuda"))
    mapped = (line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines())
    engines = next(Path(path) for path in mapped if "libcudnn_engines" in path)  # beside the library itself
    return open_cudnn_with_cublaslt(str(engines.parent))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("channels", "extent", "kernel", "stride", "groups", "dimensions"), CASES)
@pytest.mark.parametrize("backward", [False, True])
def test_a_gpu_takes_what_the_library_says(
    library: Cudnn,
    backward: bool,
    channels: int,
    extent: int,
    kernel: int,
    stride: int,
    groups: int,
    dimensions: int,
    dtype: torch.dtype,
    last: bool,
) -> None:
    """The highest level inside a convolution, above what it leaves behind, is its largest workspace. Of a
    backward pass the weight gradient is made after the data gradient's workspace is given back.
    """
    formats = {2: torch.channels_last, 3: torch.channels_last_3d}
    form = formats[dimensions] if last else torch.contiguous_format
    x = torch.randn(32, channels, *[extent] * dimensions, device="cuda", dtype=dtype).to(memory_format=form)
    sizes = (channels, channels // groups, *[kernel] * dimensions)
    w = torch.randn(sizes, device="cuda", dtype=dtype).to(memory_format=form)
    one, half = [1] * dimensions, [kernel // 2] * dimensions
    args: tuple[Any, ...] = (x, w, None, [stride] * dimensions, half, one, False, [0] * dimensions, groups)
    func: Any = aten.convolution.default
    if backward:
        args = (torch.randn_like(func(*args)), *args, [True, True, False])
        func = aten.convolution_backward.default
    taken, out = level_above(func, args)
    processors = torch.cuda.get_device_properties().multi_processor_count
    version = torch_version_of(torch.__version__)
    chip = Target(torch.cuda.get_device_capability(), processors, library.workspaces, version)
    ops = answer_convolutions(RULES[func](on_meta(args), on_meta(out), chip), chip)
    made, levels = 0, [0]
    for step in ops:
        made += step == Output()
        if isinstance(step, KernelOp) and step.kind is OpKind.TRY:
            to_come = w.numel() * w.element_size() if made == 1 else 0
            levels.append(step.number - to_come)
    assert taken == max(levels)


def level_above(func: Any, args: tuple[Any, ...]) -> tuple[int, Any]:
    """Return the bytes requested above its results, once everything is loaded, and the results."""
    func(*args)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    out = func(*args)
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    return stats["requested_bytes.all.peak"] - stats["requested_bytes.all.current"], out


def on_meta(value: Any) -> Any:
    """Return the value with tensors on meta, strides kept."""
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, (tuple, list)):
        return type(value)(map(on_meta, value))
    return value
