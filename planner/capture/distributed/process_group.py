"""A process group of which only one rank runs, on meta.

torch's `fake` backend takes part in all collectives and sends nothing. Meshes of the group lie on meta, and
their streams are those that the recorder knows, so torch's own code for a rank runs as it is.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any
from unittest import mock

import torch
from torch import Tensor, distributed

from planner.capture.cuda.device_queries import Handle, Stream as PlannedStream
from planner.capture.cuda.streams import Streams
from planner.capture.distributed.groups_aside import groups_aside
from planner.errors import UsageError

TORCH = (2, 13)  # whose FSDP is known here
GPUS_OF_A_NODE = 8  # which decides how DTensor prices its plans, and no memory of FSDP


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
        """Return the number of GPUs of a node."""
        return GPUS_OF_A_NODE


@contextmanager
def process_group(
    ranks: int, streams: Streams, on_resize: Callable[[Tensor], None], rank: int = 0
) -> Iterator[None]:
    """Make the process one rank of a group while open.

    `on_resize` is called with each tensor whose storage FSDP has freed or allocated in place. Raises
    UsageError for a torch whose FSDP is another. Groups that the process has are put aside.
    """
    installed = tuple(map(int, torch.__version__.split(".")[:2]))
    if installed != TORCH:
        raise UsageError(
            f"torch {torch.__version__} is installed: several ranks are planned as in {TORCH[0]}.{TORCH[1]}"
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    with ExitStack() as stack:
        stack.enter_context(_plans_of_rank(rank))
        stack.enter_context(groups_aside())
        for holder, name, value in _replacements(DeviceHandle(streams), on_resize):
            stack.enter_context(mock.patch.object(holder, name, value))
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


def _replacements(
    handle: DeviceHandle, on_resize: Callable[[Tensor], None]
) -> Iterator[tuple[object, str, Any]]:
    """Yield what torch.distributed does otherwise for tensors on meta: holder, name, and what replaces it."""
    from torch.distributed import _meta_registrations, device_mesh
    from torch.distributed.fsdp._fully_shard import _fsdp_init, _fsdp_param, _fsdp_param_group
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.utils._python_dispatch import _disable_current_modes

    handle_of_torch = device_mesh._get_device_handle

    def handle_of(device_type: str = "cuda") -> Any:
        return handle if device_type == "meta" else handle_of_torch(device_type)

    def resizing(resize: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        def resized(tensor: Tensor) -> None:
            resize(tensor)
            on_resize(tensor)

        return resized

    def unseen(propagate: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with _disable_current_modes():  # it runs operators on tensors that stand for whole ones
                return propagate(*args)

        return run

    move = _fsdp_init._move_states_to_device

    def moving(params: list[Any], buffers: list[Any], device: Any) -> None:
        for tensor in (*params, *buffers):
            if tensor.is_meta and not isinstance(tensor, DTensor):
                moved = tensor.to(device)  # a copy where it stands for a tensor of the CPU
                if moved is not tensor:
                    tensor.data = moved
        move(params, buffers, device)

    numbers = count()
    yield _fsdp_param.FSDPParam, "reset_sharded_param", _padding(_fsdp_param.FSDPParam.reset_sharded_param)
    yield _fsdp_init, "_move_states_to_device", moving
    for name, module in list(sys.modules.items()):  # most import the function by name
        if name.startswith("torch.distributed") and vars(module).get("_get_device_handle") is handle_of_torch:
            yield module, "_get_device_handle", handle_of
    # FSDP asks it for the stream that waits for a gather which nothing used.
    yield torch.accelerator, "current_stream", lambda device=None: handle.current_stream()
    for name in ("alloc_storage", "free_storage"):
        yield _fsdp_param, name, resizing(getattr(_fsdp_param, name))
    for name in ("_validate_no_meta_params", "_validate_cpu_offload_params"):
        yield _fsdp_param_group.FSDPParamGroup, name, lambda self: None
    for name in ("propagate_op_sharding_non_cached", "_propagate_tensor_meta_non_cached"):
        yield ShardingPropagator, name, unseen(getattr(ShardingPropagator, name))
    # torch names collectives on meta by random numbers, which would count as the model's.
    yield _meta_registrations, "generate_unique_id", lambda: next(numbers)


def _padding(reset: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return `FSDPParam.reset_sharded_param` that also pads parts on meta which are not those that FSDP made.

    Of parameters that do not divide evenly, the part that `to_empty` allocates on a late rank is smaller than
    those of the others. The first forward pass copies it into a block as large as theirs.
    """

    def run(self: Any) -> None:
        part = getattr(self._module_info.module, self._module_info.param_name)._local_tensor
        size = self.padded_sharded_param_size
        if not part.is_meta or part.size() == size or _share_storage(part, self._sharded_param_data):
            reset(self)
            return
        padded = part.new_zeros(size)
        rows = part.size(0) if part.numel() else 0
        padded.narrow(0, 0, rows).copy_(part)
        self._sharded_param_data = padded.view(-1)
        self.sharded_param._local_tensor = padded.narrow(0, 0, rows)

    return run


def _share_storage(one: Tensor, other: Tensor) -> bool:
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)
