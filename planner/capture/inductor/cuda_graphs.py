"""Run inductor's trees of CUDA graphs on meta tensors.

Warm-ups and recordings allocate in a private pool. `CUDAGraphTreeManager` and its nodes
(torch/_inductor/cudagraph_trees.py) run unchanged: they decide which function is warmed up, recorded or
replayed, and which of its inputs are copied. They identify tensors by addresses, so storages get made-up
addresses. A graph holds no operators, and its replay does nothing.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch._inductor import cudagraph_trees as trees
from torch.utils._python_dispatch import _disable_current_modes

from planner.capture.inductor.timing_memory import GpuMemory
from planner.capture.patching import always, patched
from planner.errors import ModelError

_POOL = (0, 1)  # handle of the private pool
_FIRST_ADDRESS, _PAGE = 2**40, 512
_GENERATOR_BYTES = 8  # size of a graph's random seed, and of its offset
_OP = "CUDA graph"


class _Addresses:
    """The made-up addresses of meta storages. Outputs of a replay have the addresses of its recording."""

    def __init__(self) -> None:
        self._by_storage: dict[int, tuple[int, weakref.ref[Any]]] = {}
        self._next = _FIRST_ADDRESS

    def of(self, storage: UntypedStorage) -> int:
        """Return a storage's address, assigned at the first request, or 0 if the storage has no bytes."""
        if not storage.nbytes():
            return 0
        if storage._cdata not in self._by_storage:
            self.set(storage, self._next)
            self._next += -(-storage.nbytes() // _PAGE) * _PAGE
        return self._by_storage[storage._cdata][0]

    def set(self, storage: UntypedStorage, address: int) -> None:
        """Assign an address to a storage."""
        key, table = storage._cdata, self._by_storage
        table[key] = address, weakref.ref(storage, lambda _: table.pop(key, None))


class CudaGraphs:
    """The replacements that make inductor's CUDA graphs work on meta tensors during one capture."""

    def __init__(self, memory: GpuMemory) -> None:
        self._memory = memory
        self._addresses = _Addresses()
        self._is_running = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Make inductor's trees of CUDA graphs work on meta tensors inside the context."""
        manager = trees.CUDAGraphTreeManager
        trees.reset_cudagraph_trees()
        try:
            with (
                patched(manager, "__init__", self._standing_in(manager.__init__)),
                patched(manager, "run", self._standing_in(manager.run)),
            ):
                yield
                with self._in_place_of_gpu():
                    trees.reset_cudagraph_trees()
        finally:
            trees.reset_cudagraph_trees()

    def _standing_in(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._is_running:
                return plain(*args, **kwargs)
            with self._in_place_of_gpu():
                self._is_running = True
                try:
                    return plain(*args, **kwargs)
                finally:
                    self._is_running = False

        return run

    @contextmanager
    def _in_place_of_gpu(self) -> Iterator[None]:
        with ExitStack() as stack:
            for holder, name, value in self._replaced():
                stack.enter_context(patched(holder, name, value, create=True))
            yield

    def _replaced(self) -> Iterator[tuple[Any, str, Any]]:
        nothing = always(None)
        recorder, addresses = self._memory.recorder, self._addresses
        yield trees, "_use_cuda_memory_pool_manager", self._pool
        yield trees, "_update_current_stream_external_object", nullcontext
        yield trees, "preserve_rng_state", nullcontext
        for name in ("synchronize", "current_stream"):
            yield torch.cuda, name, nothing
        yield torch.cuda, "Stream", _Stream
        yield torch.cuda, "device", lambda device: nullcontext()
        yield torch.cuda, "graph_pool_handle", always(_POOL)
        yield torch.cuda, "CUDAGraph", lambda: _Graph(self._memory)
        yield torch.cuda, "graph", self._capture
        for name in (
            "_cudnn_set_conv_benchmark_empty_cache", "_cuda_get_conv_benchmark_empty_cache",
            "_cuda_getCheckpointState", "_set_storage_access_error_msg",
            "_set_storage_data_ptr_access_error_msg",
        ):  # fmt: skip
            yield torch._C, name, nothing
        yield torch._C, "_cuda_checkPoolLiveAllocations", always(True)
        yield torch._C, "_cuda_setCheckpointPoolState", _refuse
        yield torch._C, "_cuda_clearCublasWorkspaces", recorder.clear_cublas_workspaces
        yield torch._C, "_free_And_Remove_DeleterFn", self._free
        yield torch._C, "_construct_storage_from_data_pointer", self._storage_at
        yield torch._C, "_construct_CUDA_Tensor_From_Storage_And_Metadata", _tensor_of
        yield torch._C, "_tensors_data_ptrs_at_indices_equal", _are_at
        yield UntypedStorage, "data_ptr", lambda storage: addresses.of(storage)
        yield Tensor, "data_ptr", lambda tensor: self._address_of_tensor(tensor)
        yield Tensor, "is_cuda", property(lambda tensor: tensor.is_meta)

    @contextmanager
    def _pool(self, *_: Any, **__: Any) -> Iterator[None]:
        with self._memory.recorder.graph_pool():
            yield

    @contextmanager
    def _capture(self, graph: "_Graph", **_: Any) -> Iterator[None]:
        """Empty the cache, and record allocations in the private pool inside the context.

        `torch.cuda.graph` does the same.
        """
        self._memory.recorder.record_empty_cache()
        graph.begin()
        with self._memory.recorder.graph_pool():
            yield

    def _address_of_tensor(self, tensor: Tensor) -> int:
        start = self._addresses.of(tensor.untyped_storage())
        return start + int(tensor.storage_offset()) * tensor.element_size()

    def _storage_at(self, address: int, device: torch.device, size_bytes: int) -> UntypedStorage:
        """Return a new meta storage at a made-up address, without recording an allocation."""
        with _disable_current_modes():
            storage = UntypedStorage(size_bytes, device="meta")  # type: ignore[no-untyped-call]
        self._addresses.set(storage, address)
        return storage

    def _free(self, storage_pointer: int) -> None:
        storage = UntypedStorage._new_with_weak_ptr(storage_pointer)
        self._memory.recorder.free_storage(storage)


class _Stream:
    def wait_stream(self, stream: Any) -> None:
        """Do nothing, since all work runs on one stream."""


class _Graph:
    """The stand-in for `torch.cuda.CUDAGraph`, which holds random number state on the GPU.

    The state is allocated as in CUDAGeneratorState::register_graph (ATen/cuda/CUDAGeneratorImpl.cpp).
    """

    def __init__(self, memory: GpuMemory) -> None:
        self._memory = memory
        self._state: list[Tensor] = []

    def begin(self) -> None:
        """Allocate the random number state."""
        self._state = [self._memory.allocate(_GENERATOR_BYTES, _OP) for _ in range(2)]

    def replay(self) -> None:
        """Do nothing, since a graph's memory is already allocated."""

    def register_generator_state(self, generator: Any) -> None:
        """Do nothing, since `begin` allocates the state."""


def _are_at(tensors: Sequence[Any], addresses: Sequence[int | None], places: Sequence[int]) -> bool:
    return all(tensors[place].data_ptr() == addresses[place] for place in places)


def _tensor_of(metadata: dict[str, Any], storage: UntypedStorage) -> Tensor:
    with _disable_current_modes():
        tensor = torch.empty(0, dtype=metadata["dtype"], device="meta")
        return tensor.set_(storage, metadata["storage_offset"], metadata["size"], metadata["stride"])


def _refuse(*_: Any) -> None:
    raise ModelError(
        "torch.compile: CUDA graphs are recorded after others were replayed, which is not planned; "
        "plan with --compile default"
    )
