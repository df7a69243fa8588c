"""Build models whose buffers have values, and make values of tensors deterministic."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from planner.capture.cuda.threads import beside_other_threads
from planner.capture.models.meta_init import construct_with_values

SEED = 0


@contextmanager
def construct_with_buffers() -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Construct models with their parameters on meta, but buffers with their values, while open.

    The list fills with pairs of a buffer and its like on meta.
    """
    buffers: list[tuple[Tensor, Tensor]] = []

    def build(construct: Callable[[], object]) -> object:
        model, pairs = construct_with_values(construct)
        buffers.extend(pairs)
        return model

    with mock.patch("planner.capture.models.registry.construct_on_meta", build):
        yield buffers


@contextmanager
def deterministic_values() -> Iterator[None]:
    """Keep values of tensors made from Python's numbers on the way to meta, and seed the generator, while
    open. One thread runs, since most tensors are small.
    """
    threads = torch.get_num_threads()
    plain, new = torch.as_tensor, Tensor.new_tensor

    def tensor(
        data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False, **_: Any
    ) -> Tensor:
        made = plain(data, dtype=dtype).clone() if isinstance(data, Tensor) else plain(data, dtype=dtype)
        return made.to(device=device).requires_grad_(requires_grad)

    def as_tensor(data: Any, dtype: Any = None, device: Any = None) -> Tensor:
        return plain(data, dtype=dtype).to(device=device)

    def new_tensor(self: Tensor, data: Any, **options: Any) -> Tensor:
        if not self.is_meta:
            return new(self, data, **options)
        defaults: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        return tensor(data, **(defaults | options))

    with torch.random.fork_rng(devices=[]), ExitStack() as stack:
        for owner, replacement in ((torch, tensor), (torch, as_tensor), (Tensor, new_tensor)):
            name = replacement.__name__
            patched = beside_other_threads(replacement, getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, patched))
        torch.manual_seed(SEED)
        stack.callback(torch.set_num_threads, threads)
        torch.set_num_threads(1)
        yield
