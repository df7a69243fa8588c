"""CUDA's semantics on the `meta` device.

Composite operators ask for the device of their inputs and take another path on CUDA than on meta. Kernels
registered from Python at the `AutogradMeta` key answer as CUDA would; they are global to the process, so
they stand only while `cuda_semantics` is open.
"""

import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

from planner.trace.cuda import attention, dropout, linear

_OPEN = threading.Lock()


@contextmanager
def cuda_semantics(capability: tuple[int, int]) -> Iterator[None]:
    """While open, operators on `meta` take the paths that they take on a CUDA GPU of this compute capability.

    Raises RuntimeError where it is open already, in this thread or another.
    """
    if not _OPEN.acquire(blocking=False):
        raise RuntimeError("another trace is running in this process; traces run one at a time")
    try:
        with ExitStack() as stack:
            library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
            stack.callback(library._destroy)
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore"
                )  # torch warns that a kernel is overridden, which is the purpose
                for rules in (attention, dropout, linear):
                    for name, kernel in rules.kernels(capability).items():
                        library.impl(name, kernel, "AutogradMeta")  # type: ignore[no-untyped-call]
            for target, replacement in _device_lists():
                stack.enter_context(mock.patch(target, replacement))
            yield
    finally:
        _OPEN.release()


def _device_lists() -> list[tuple[str, object]]:
    """Python code of torch that looks at the device's name, and what it shall answer for `meta`."""
    return [
        # nn.MultiheadAttention takes its fast path in inference on cuda, but not on meta
        ("torch.nn.modules.activation._check_arg_device", lambda tensor: True),
        # fused optimizers refuse parameters on meta
        ("torch.optim.optimizer._get_fused_kernels_supported_devices", lambda: ["cuda", "meta"]),
    ]
