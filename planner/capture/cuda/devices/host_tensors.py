"""Track the meta tensors that stand for CPU tensors.

Such tensors take no memory of the GPU. Batches of a data loader are on the CPU and may be large, so in a
capture they are on the meta device like all other tensors. An operator whose tensors are all on the CPU
returns tensors on the CPU.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor

from planner.capture.arguments import as_cpu_tensor, leaves_of, map_leaves
from planner.program import pinned_bytes

_aten = torch.ops.aten
_TAKE_BOTH = frozenset(
    (
        _aten.copy_,
        # Indices (ATen/native/TensorAdvancedIndexing.cpp), lengths of sequences and of targets.
        *(_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_),
        *(_aten._pack_padded_sequence, _aten._pad_packed_sequence),
        *(_aten._ctc_loss, _aten._ctc_loss_backward, _aten._cudnn_ctc_loss),
        _aten.tensor_split,
    )
)


def innermost(tensor: Tensor) -> Tensor:
    """Return the tensor inside the wrappers of torch.func. Wrappers have no storage themselves."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


class Side(Enum):
    """The memory in which an operator puts its results: the GPU's or the host's."""

    GPU = auto()
    HOST = auto()


class HostTensors:
    """The meta tensors that stand for CPU tensors in one capture. They are tracked by their storages."""

    def __init__(self) -> None:
        self._storages: dict[int, weakref.ref[Any]] = {}
        self.destination: Side | None = None  # of results; None if the arguments determine it
        self.have_met = False  # whether an operator got tensors of both sides
        self._pinned: dict[int, int] = {}  # bytes of the living pinned storages, by `_cdata`
        self._pinned_bytes = self._most_bytes = 0  # bytes that torch pins for them, now and at the peak
        self.most_pinned: tuple[int, ...] = ()  # bytes of each pinned storage when the sum was largest

    def __bool__(self) -> bool:
        return bool(self._storages)

    def __contains__(self, tensor: Tensor) -> bool:
        return bool(self._storages) and innermost(tensor).untyped_storage()._cdata in self._storages

    def add(self, tensor: Tensor) -> None:
        """Mark a meta tensor, and so all tensors that share its storage, as CPU tensors."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            self._storages[key] = weakref.ref(storage, lambda _: self._storages.pop(key, None))

    def pin(self, tensor: Tensor) -> Tensor:
        """Mark a meta tensor as a CPU tensor in pinned memory, and return the tensor."""
        self.add(tensor)
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._pinned and storage.nbytes():
            self._pinned[key] = storage.nbytes()
            self._pinned_bytes += pinned_bytes([storage.nbytes()])
            weakref.finalize(storage, self._unpin, key).atexit = False
            if self._pinned_bytes > self._most_bytes:
                self._most_bytes, self.most_pinned = self._pinned_bytes, tuple(self._pinned.values())
        return tensor

    def _unpin(self, key: int) -> None:
        self._pinned_bytes -= pinned_bytes([self._pinned.pop(key)])

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether a tensor is marked as a tensor in pinned memory."""
        return innermost(tensor).untyped_storage()._cdata in self._pinned

    @contextmanager
    def moving_to(self, side: Side) -> Iterator[None]:
        """Put the results of operators on `side` inside the context, whatever the sides of the arguments."""
        before, self.destination = self.destination, side
        try:
            yield
        finally:
            self.destination = before

    def side_of(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Side:
        """Return the side of an operator's results: HOST if all its meta arguments are CPU tensors, else GPU.

        Inside `moving_to`, its side is returned. Raises RuntimeError, as torch does on a GPU, if the
        arguments include tensors of both sides, unless the CPU tensors are scalars or the operator takes
        both.
        """
        if self.destination is not None:
            return self.destination
        if not self._storages:
            return Side.GPU
        tensors = [one for one in leaves_of(args, kwargs or ()) if isinstance(one, Tensor) and one.is_meta]
        on_host = [one for one in tensors if one in self]
        if on_host and len(on_host) == len(tensors):
            return Side.HOST
        if any(one.dim() for one in on_host) and func.overloadpacket not in _TAKE_BOTH:
            self.have_met = True
            raise RuntimeError("expected all tensors to be on the same device, not on the CPU and on meta")
        return Side.GPU

    def marked(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return an operator's arguments with CPU tensors marked by `as_cpu_tensor`, for workspace rules."""

        def mark(value: Any) -> Any:
            return as_cpu_tensor(value) if isinstance(value, Tensor) and value in self else value

        if not self._storages:
            return args
        marked: tuple[Any, ...] = map_leaves(mark, args)
        return marked

    def likes_of(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        copy_to_meta: Callable[[Tensor], Tensor],
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return arguments with meta tensors in place of real CPU tensors, or None if none may be replaced.

        The meta tensors count as CPU tensors. User code made the real tensors on the CPU; scalar tensors are
        not replaced. The result is None if no argument is a real CPU tensor, if the operator changes a real
        CPU tensor in place, if no argument is on the meta device, or if an argument on the meta device is a
        tensor of the GPU.
        """
        tensors = [one for one in leaves_of((args, kwargs)) if isinstance(one, Tensor)]
        made = [one for one in tensors if one.device.type == "cpu" and one.dim()]
        others = [one for one in tensors if one.is_meta]
        is_changed = func._schema.is_mutable and any(args[0] is one for one in made)
        if not made or is_changed or not others or any(one not in self for one in others):
            return None
        likes = {id(one): copy_to_meta(one) for one in made}
        for like in likes.values():
            self.add(like)

        def on_meta(value: Any) -> Any:
            return likes.get(id(value), value)

        return map_leaves(on_meta, args), map_leaves(on_meta, kwargs)

    def add_results(self, out: Any) -> None:
        """Mark the meta tensors among an operator's results as CPU tensors."""
        for one in leaves_of(out):
            if isinstance(one, Tensor) and one.is_meta:
                self.add(one)
