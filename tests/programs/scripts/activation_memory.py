"""Models that decide which activations are kept, and where: selective checkpoints and offload to the CPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default}
ATTENTION = {
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
}


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend, then transform each token."""
        heads = self.qkv(self.first_norm(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(functional.gelu(self.up(self.second_norm(x))))


class Net(nn.Module):
    """Blocks and a layer of scores, all of whose activations are kept."""

    def __init__(self, width: int = 256, layers: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        for number, block in enumerate(self.blocks):
            x = self.run(number, block, x)
        return self.head(x.mean(1))

    def run(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        """Run one block."""
        return block(x)


class EverySecond(Net):
    """Checkpoints every second block."""

    def run(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        """Run one block."""
        return checkpoint(block, x, use_reentrant=False) if number % 2 else block(x)


class Reentrant(Net):
    """Checkpoints by the older implementation."""

    def run(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        """Run one block."""
        return checkpoint(block, x, use_reentrant=True)


class Saving(Net):
    """Checkpoints each block but for the results of some operators."""

    saved: set[Any] = PRODUCTS

    def run(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        """Run one block."""
        contexts = partial(create_selective_checkpoint_contexts, self.policy())
        return checkpoint(block, x, use_reentrant=False, context_fn=contexts)

    def policy(self) -> Callable[..., CheckpointPolicy]:
        """Return a policy that saves operators of the set."""

        def decide(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            saves = op in self.saved
            return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

        return decide


class SavingAttention(Saving):
    """Saves attention alone."""

    saved = ATTENTION


class SavingBoth(Saving):
    """Saves products and attention."""

    saved = PRODUCTS | ATTENTION


class SavingList(Saving):
    """Gives a list of operators in place of a policy."""

    def run(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        """Run one block."""
        contexts = partial(create_selective_checkpoint_contexts, list(PRODUCTS | ATTENTION))
        return checkpoint(block, x, use_reentrant=False, context_fn=contexts)


class SavingHalf(Saving):
    """Saves every second product, as torchtitan does, and attention."""

    def policy(self) -> Callable[..., CheckpointPolicy]:
        """Return a policy that counts products, in the forward pass and again in the backward pass."""
        counted = {True: 0, False: 0}

        def decide(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            is_again = bool(context.is_recompute)
            counted[is_again] += op in PRODUCTS
            saves = op in ATTENTION or (op in PRODUCTS and counted[is_again] % 2 == 0)
            return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

        return decide


class Offloading(Net):
    """Keeps activations of all blocks in pinned memory of the CPU."""

    pins = True

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        with torch.autograd.graph.save_on_cpu(pin_memory=self.pins):
            for block in self.blocks:
                x = block(x)
        return self.head(x.mean(1))


class OffloadingPageable(Offloading):
    """Keeps them in memory of the CPU that is not pinned."""

    pins = False


class OffloadingInputs(Net):
    """Checkpoints blocks, whose inputs are kept in memory of the CPU."""

    def run(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        """Run one block."""
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            return checkpoint(block, x, use_reentrant=False)


class OffloadingHalf(Net):
    """Keeps activations of every second block in memory of the CPU."""

    def run(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        """Run one block."""
        if number % 2:
            return block(x)
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            return block(x)


@contextmanager
def large_tensors_on_cpu(least: int) -> Iterator[None]:
    """Keep saved tensors of so many elements in pinned memory of the CPU, copied without waiting."""

    def pack(saved: Tensor) -> Any:
        if saved.numel() < least or not saved.is_cuda:
            return saved
        copied = torch.empty_like(saved, device="cpu", pin_memory=True)
        copied.copy_(saved, non_blocking=True)
        return saved.device, copied

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        device, copied = packed
        return copied.to(device, non_blocking=True)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


class OffloadingLarge(Net):
    """Keeps large activations in pinned memory of the CPU, by hooks of its own."""

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        with large_tensors_on_cpu(2**16):
            for block in self.blocks:
                x = block(x)
        return self.head(x.mean(1))
