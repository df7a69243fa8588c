"""Build models whose buffers have values, and make the values of tensors deterministic."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from planner.capture.cuda.devices.placement import GPU, is_put_on_gpu
from planner.capture.models.meta_init import construct_with_values
from planner.capture.patching import patched

SEED = 0


@contextmanager
def buffer_values_kept() -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Keep the buffer values of models that are built inside the context.

    The models are built on the meta device. Yields a list to which pairs of a buffer with values and its
    counterpart on the meta device are added.
    """
    buffers: list[tuple[Tensor, Tensor]] = []

    def build(construct: Callable[[], object]) -> object:
        model, pairs = construct_with_values(construct)
        buffers.extend(pairs)
        return model

    registry = import_module("planner.capture.models.registry")  # which imports this module
    with patched(registry, "construct_on_meta", build):
        yield buffers


@contextmanager
def deterministic_values() -> Iterator[None]:
    """Seed torch's generator, and make a capture see the copies of tensors inside the context.

    torch runs one thread, since most tensors are small.
    """
    threads = torch.get_num_threads()
    plain, of_numbers, new = torch.as_tensor, torch.tensor, Tensor.new_tensor

    def tensor(
        data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False, **_: Any
    ) -> Tensor:
        if not isinstance(data, Tensor):
            return of_numbers(data, dtype=dtype, device=device, requires_grad=requires_grad)
        return plain(data, dtype=dtype).clone().to(device=device).requires_grad_(requires_grad)

    def as_tensor(data: Any, dtype: Any = None, device: Any = None) -> Tensor:
        if not isinstance(data, Tensor):
            return plain(data, dtype=dtype, device=device)
        return plain(data, dtype=dtype).to(device=device)

    def new_tensor(self: Tensor, data: Any, **options: Any) -> Tensor:
        if not self.is_meta:
            return new(self, data, **options)
        device = GPU if is_put_on_gpu(self) else self.device
        defaults: dict[str, Any] = {"dtype": self.dtype, "device": device}
        return tensor(data, **(defaults | options))

    with torch.random.fork_rng(devices=[]), ExitStack() as stack:
        for owner, replacement in ((torch, tensor), (torch, as_tensor), (Tensor, new_tensor)):
            stack.enter_context(patched(owner, replacement.__name__, replacement))
        torch.manual_seed(SEED)
        stack.callback(torch.set_num_threads, threads)
        torch.set_num_threads(1)
        yield
