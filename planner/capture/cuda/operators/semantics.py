"""Make operators on the `meta` device follow the code paths of CUDA.

Composite operators inspect the device of their inputs and take different paths on CUDA and on the meta
device. Kernels that this module registers from Python at the `AutogradMeta` key take CUDA's path. Kernels of
operators that torch cannot run on the meta device are registered at the key `Meta`. All of these kernels are
global to the process, so they are registered only while `cuda_semantics` is open. The same holds for the
kernels of CUDA's autocast, registered at the key `AutocastCUDA`.
"""

import pkgutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from planner.capture.cuda.autocast import mode as autocast, rnn as autocast_rnn
from planner.capture.cuda.operators import (
    assignment,
    attention,
    composites,
    encoder,
    projections,
    rnn,
    second_order,
    selections,
    slicing,
)
from planner.capture.cuda.optimizers import implementations as optimizers
from planner.capture.meta_kernels.cuda_layouts import MISSING
from planner.capture.patching import kernels_registered, patched
from planner.program import NEWEST_TORCH, TorchVersion

_OPEN = threading.Lock()


Suspended = Callable[[], AbstractContextManager[object]]


@contextmanager
def cuda_semantics(capability: tuple[int, int], version: TorchVersion = NEWEST_TORCH) -> Iterator[Suspended]:
    """Make operators on `meta` take the code paths of CUDA inside the context.

    `capability` is the compute capability of the GPU. `version` is the version of torch on the GPU. Yields a
    function that opens a context in which torch is unchanged, except for autocast. Raises RuntimeError if the
    process has already opened such a context.
    """
    if not _OPEN.acquire(blocking=False):
        raise RuntimeError("another trace is running in this process; traces run one at a time")
    casts = autocast.CastCache()
    stack = ExitStack()

    @contextmanager
    def suspended() -> Iterator[None]:
        stack.close()
        try:
            yield
        finally:
            _open(stack, capability, version, casts)

    try:
        kernels = autocast.kernels(casts) | autocast_rnn.kernels(casts)
        with kernels_registered(kernels, "AutocastCUDA"), stack:
            _open(stack, capability, version, casts)
            yield suspended
    finally:
        _OPEN.release()


def has_cuda_semantics() -> bool:
    """Return whether `cuda_semantics` is open in this process, even if it is suspended now."""
    return _OPEN.locked()


def _open(
    stack: ExitStack, capability: tuple[int, int], version: TorchVersion, casts: autocast.CastCache
) -> None:
    """Register CUDA's kernels and replace torch's functions until the stack closes."""
    stack.enter_context(kernels_registered(_kernels(capability, version), "AutogradMeta"))
    stack.enter_context(kernels_registered(MISSING, "Meta"))
    indexing = (*assignment.patches(), *slicing.patches(version))
    others = (*autocast.patches(casts.clear), *second_order.patches(), *rnn.patches())
    patches = (*_device_checks(), *indexing, *projections.patches(version), *others)
    for target, replacement in patches:
        holder, _, name = target.rpartition(".")
        stack.enter_context(patched(pkgutil.resolve_name(holder), name, replacement))
    stack.enter_context(autocast.included())


def _kernels(capability: tuple[int, int], version: TorchVersion) -> dict[str, Callable[..., Any]]:
    kernels = {**composites.kernels(version), **encoder.kernels(capability, version), **selections.KERNELS}
    return kernels | attention.kernels(capability, version) | rnn.kernels(capability)


def _device_checks() -> Iterator[tuple[str, object]]:
    """Yield the names of torch's checks for devices and extensions, with replacements that accept `meta`."""
    # nn.MultiheadAttention takes its fast path in inference on cuda, but not on the meta device
    yield "torch.nn.modules.activation._check_arg_device", lambda tensor: True
    # nn.TransformerEncoderLayer names devices inline; only the out-of-tree backend's name is a variable
    yield "torch.utils.backend_registration._privateuse1_backend_name", "meta"
    yield from optimizers.patches()
    # torchvision's operators check for the extension before they are called; on a GPU it is installed
    for name, module in sys.modules.copy().items():
        if name.startswith("torchvision.ops.") and hasattr(module, "_assert_has_ops"):
            yield f"{name}._assert_has_ops", lambda: None
