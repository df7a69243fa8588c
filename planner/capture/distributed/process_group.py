"""Open a process group on the meta device in which only one rank runs.

torch's `fake` backend takes part in all collectives and sends nothing. Meshes of the group are on the meta
device and use the streams that the recorder tracks, so torch's own code for a rank runs unchanged.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any

import torch
from torch import distributed

from planner.capture.cuda.devices.queries import Handle, Stream as PlannedStream
from planner.capture.cuda.names import Replacement
from planner.capture.cuda.streams import Streams
from planner.capture.distributed.groups_aside import groups_aside
from planner.capture.patching import patched
from planner.errors import UsageError
from planner.hardware import GPUS_OF_A_NODE
from planner.program import NEWEST_TORCH, format_torch_version, torch_version_of


class DeviceHandle:
    """The stand-in for `torch.cuda` in meshes on the meta device. It makes streams that are recorded.

    torch.distributed calls its methods.
    """

    Event = Handle

    def __init__(self, streams: Streams) -> None:
        """Store `streams`, which the recorder tracks."""
        self._streams = streams

    def Stream(self, device: Any = None, priority: int = 0) -> "PlannedStream":  # noqa: N802  # torch's name
        """Return the next stream of a priority in the pool."""
        return PlannedStream(self._streams, self._streams.make(priority))

    def stream(self, stream: "PlannedStream") -> "PlannedStream":
        """Return `stream`. As a context manager, the stream makes itself current."""
        return stream

    def current_stream(self) -> "PlannedStream":
        """Return the current stream."""
        return PlannedStream(self._streams, self._streams.current)

    def current_device(self) -> None:
        """Return None, since the meta device has no index."""

    def device_count(self) -> int:
        """Return the number of GPUs of a node. DTensor estimates communication costs from the number."""
        return GPUS_OF_A_NODE


@contextmanager
def process_group(
    ranks: int, streams: Streams, rank: int = 0, replacements: Iterable[Replacement] = ()
) -> Iterator[None]:
    """Make the process rank `rank` of a process group of `ranks` ranks inside the context.

    Existing process groups are hidden inside the context, and `replacements` are made in torch. Raises
    UsageError if the installed torch is not `NEWEST_TORCH`, whose distributed code this module follows.
    """
    if torch_version_of(torch.__version__) != NEWEST_TORCH:
        newest = format_torch_version(NEWEST_TORCH)
        raise UsageError(f"torch {torch.__version__} is installed: several ranks are planned as in {newest}")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with ExitStack() as stack:
        stack.enter_context(_own_plans())
        stack.enter_context(groups_aside())
        for holder, name, value in (*_replacements(DeviceHandle(streams)), *replacements):
            stack.enter_context(patched(holder, name, value))
        distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        stack.callback(distributed.destroy_process_group)
        yield


@contextmanager
def _own_plans() -> Iterator[None]:
    """Clear DTensor's cache of operator plans on entry and exit.

    torch finds a plan by its mesh. Meshes of different ranks and jobs may be equal, but the groups in the
    meshes, and the names of the groups, differ.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


def _replacements(handle: DeviceHandle) -> Iterator[Replacement]:
    """Yield replacements for functions of torch that fail with meta tensors or are recorded wrongly."""
    from torch.distributed import _meta_registrations, device_mesh
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.utils._python_dispatch import _disable_current_modes

    handle_of_torch = device_mesh._get_device_handle

    def handle_of(device_type: str = "cuda") -> Any:
        return handle if device_type == "meta" else handle_of_torch(device_type)

    def unseen(propagate: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with _disable_current_modes():  # it runs operators on stand-ins for unsharded tensors
                return propagate(*args)

        return run

    numbers = count()
    for name, module in list(sys.modules.items()):  # most import the function by name
        if name.startswith("torch.distributed") and vars(module).get("_get_device_handle") is handle_of_torch:
            yield module, "_get_device_handle", handle_of
    # FSDP uses it to get the stream that waits for a gather whose result is unused.
    yield torch.accelerator, "current_stream", lambda device=None: handle.current_stream()
    for name in ("propagate_op_sharding_non_cached", "_propagate_tensor_meta_non_cached"):
        yield ShardingPropagator, name, unseen(getattr(ShardingPropagator, name))
    # torch names collectives of meta tensors by random numbers, whose use would be attributed to the model.
    yield _meta_registrations, "generate_unique_id", lambda: next(numbers)
