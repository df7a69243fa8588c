"""A process group of which only one rank runs, on meta.

torch's `fake` backend takes part in all collectives and sends nothing. Meshes of the group lie on meta, and
their streams are those that the recorder knows, so torch's own code for a rank runs as it is.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any

import torch
from torch import distributed

from planner.capture.cuda.device_queries import Handle, Stream as PlannedStream
from planner.capture.cuda.names import Replacement
from planner.capture.cuda.streams import Streams
from planner.capture.distributed.groups_aside import groups_aside
from planner.capture.patching import patched
from planner.errors import UsageError
from planner.hardware import GPUS_OF_A_NODE
from planner.program import NEWEST_TORCH, format_torch_version, torch_version_of


class DeviceHandle:
    """The module that stands for `torch.cuda` where torch.distributed asks for that of a mesh on meta."""

    Event = Handle

    def __init__(self, streams: Streams) -> None:
        """Take the streams of the process."""
        self._streams = streams

    def Stream(self, device: Any = None, priority: int = 0) -> "PlannedStream":  # noqa: N802  # torch's name
        """Return a stream of the pool."""
        return PlannedStream(self._streams, self._streams.make(priority))

    def stream(self, stream: "PlannedStream") -> "PlannedStream":
        """Return what makes a stream the current one."""
        return stream

    def current_stream(self) -> "PlannedStream":
        """Return the stream on which work is queued."""
        return PlannedStream(self._streams, self._streams.current)

    def current_device(self) -> None:
        """Return no index, as the device of tensors on meta has none."""

    def device_count(self) -> int:
        """Return the number of GPUs of a node, by which DTensor prices its plans."""
        return GPUS_OF_A_NODE


@contextmanager
def process_group(
    ranks: int, streams: Streams, rank: int = 0, replacements: Iterable[Replacement] = ()
) -> Iterator[None]:
    """Make the process one rank of a group while open, with further replacements of names of torch.

    Raises UsageError for a version of torch whose ranks are not known here. Groups of the process are put
    aside.
    """
    if torch_version_of(torch.__version__) != NEWEST_TORCH:
        newest = format_torch_version(NEWEST_TORCH)
        raise UsageError(f"torch {torch.__version__} is installed: several ranks are planned as in {newest}")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with ExitStack() as stack:
        stack.enter_context(_plans_of_rank(rank))
        stack.enter_context(groups_aside())
        for holder, name, value in (*_replacements(DeviceHandle(streams)), *replacements):
            stack.enter_context(patched(holder, name, value))
        distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        stack.callback(distributed.destroy_process_group)
        yield


@contextmanager
def _plans_of_rank(rank: int) -> Iterator[None]:
    """Keep the first rank's plans of DTensor's operators from others while open.

    torch finds them by meshes, which are equal on all ranks, while the groups in them are a rank's own.
    """
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    if not rank and not distributed.is_initialized():
        yield
        return
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]


def _replacements(handle: DeviceHandle) -> Iterator[Replacement]:
    """Yield replacements of functions of torch.distributed that fail or record too much on meta."""
    from torch.distributed import _meta_registrations, device_mesh
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.utils._python_dispatch import _disable_current_modes

    handle_of_torch = device_mesh._get_device_handle

    def handle_of(device_type: str = "cuda") -> Any:
        return handle if device_type == "meta" else handle_of_torch(device_type)

    def unseen(propagate: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with _disable_current_modes():  # it runs operators on tensors that stand for whole ones
                return propagate(*args)

        return run

    numbers = count()
    for name, module in list(sys.modules.items()):  # most import the function by name
        if name.startswith("torch.distributed") and vars(module).get("_get_device_handle") is handle_of_torch:
            yield module, "_get_device_handle", handle_of
    # FSDP asks it for the stream that waits for a gather which nothing used.
    yield torch.accelerator, "current_stream", lambda device=None: handle.current_stream()
    for name in ("propagate_op_sharding_non_cached", "_propagate_tensor_meta_non_cached"):
        yield ShardingPropagator, name, unseen(getattr(ShardingPropagator, name))
    # torch names collectives on meta by random numbers, which would count as the model's.
    yield _meta_registrations, "generate_unique_id", lambda: next(numbers)
