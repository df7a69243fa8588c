"""Compute inductor's constants on the CPU instead of the GPU.

inductor computes the constants while it compiles.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._inductor.fx_passes import joint_graph
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental import proxy_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from planner.capture.patching import patched


class _OnCpu(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that creates tensors on the CPU instead of the GPU."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def place(value: Any) -> Any:
            is_gpu = isinstance(value, torch.device) and value.type == "cuda"
            return torch.device("cpu") if is_gpu else value

        named = {name: place(value) for name, value in (kwargs or {}).items()}
        return func(*map(place, args), **named)


@contextmanager
def constants_on_cpu() -> Iterator[None]:
    """Make inductor fold constants on the CPU, instead of the GPU, inside the context."""
    folder = joint_graph.UniformValueConstantFolder
    with (
        patched(folder, "_deduce_value", _on_cpu(folder._deduce_value)),
        patched(proxy_tensor, "unset_fake_temporarily", _unfaked_on_cpu),
    ):
        yield


@contextmanager
def _unfaked_on_cpu() -> Iterator[Any]:
    """Disable and yield the fake tensor mode, and create tensors on the CPU, not the GPU, inside the context.

    While it traces, `proxy_call` uses the context to compute with the values of `torch.tensor([...])`.
    """
    with unset_fake_temporarily() as mode, _OnCpu():  # type: ignore[no-untyped-call]
        yield mode


def _on_cpu(plain: Callable[..., Any]) -> Callable[..., Any]:
    def deduce(self: Any, node: Any) -> Any:
        with _OnCpu():  # type: ignore[no-untyped-call]
            return plain(self, node)

    return deduce
