"""Steps of torchtune's recipes of autumn 2024 over the modules of torchtune_llama.py, one for each row.

Each row of 3B adds to the one before: layers and loss compiled, the loss in eight chunks, layers recomputed,
the optimizer's steps in the backward pass, saved tensors on the CPU, state of 8 bits; LoRA and QLoRA have
them all but the optimizer's. Those of 8B are the recipes' configurations of 24 September 2024.
Packed texts are attended to by flex_attention, which is compiled by itself: the layers' code breaks there.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import bitsandbytes
import torch
import torchao.optim
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4

from benchmarks.accuracy.torchtune_llama import LLAMA_3B, LLAMA_8B, Llama

SCALE, CHUNKS = 2.0, 8
SMALLEST_OFFLOADED_BYTES = 1024
STATE_BLOCK = 2048  # numbers that share a scale of the state


class Recomputing(nn.Module):
    """A layer whose activations are computed again in the backward pass."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any) -> Any:
        return checkpoint(self.layer, *args, use_reentrant=False)


class _Lora(nn.Module):
    """A linear layer with an adapter of low rank beside it; its own weight is not trained."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.weight = base.weight
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self._product(x)
        return out + SCALE * self.b(self.a(x))

    def _product(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class _Nf4(nn.Module):
    """A linear layer whose weight is not trained and in NF4."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(to_nf4(base.weight))

    def forward(self, x: Tensor) -> Tensor:
        return linear_nf4(x, self.weight)  # type: ignore[no-any-return, no-untyped-call]


class _Qlora(_Lora):
    """An adapter beside a weight in NF4."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__(base, rank)
        self.weight = nn.Parameter(to_nf4(base.weight))

    def _product(self, x: Tensor) -> Tensor:
        return linear_nf4(x, self.weight)  # type: ignore[no-any-return, no-untyped-call]


@contextmanager
def in_bfloat16() -> Iterator[None]:
    """Make parameters in bfloat16."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention by a fused kernel."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@dataclass(frozen=True, slots=True)
class Adapters:
    """The layers that have an adapter, its rank, and whether the weights of layers are in NF4."""

    attention: tuple[str, ...] = ("query", "value", "output")
    mlp: tuple[str, ...] = ("gate", "up", "down")
    rank: int = 64
    quantizes: bool = False

    def add(self, model: Llama) -> None:
        """Replace layers, and train nothing but the adapters."""
        for layer in model.layers:
            attention: Any = layer.attention
            for module, names in ((attention, self.attention), (layer, self.mlp)):
                for name, child in [*module.named_children()]:
                    if isinstance(child, nn.Linear):
                        setattr(module, name, self._replaced(child, has_adapter=name in names))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".a." in name or ".b." in name)

    def _replaced(self, layer: nn.Linear, *, has_adapter: bool) -> nn.Module:
        if not has_adapter:
            return _Nf4(layer) if self.quantizes else layer
        return (_Qlora if self.quantizes else _Lora)(layer, self.rank)


class _Step:
    """A step of a recipe with its model and optimizer."""

    size = LLAMA_3B
    compiles = chunks = recomputes = steps_in_backward = offloads = False
    adapters: Adapters | None = None

    def __init__(self) -> None:
        with torch.device("cuda"), in_bfloat16():
            model = Llama(self.size)
            if self.adapters:
                self.adapters.add(model)
        if self.compiles:
            for layer in model.layers:
                layer.attention.attend = torch.compiler.disable(attend)
                layer.compile()
        self._loss: Callable[[Tensor, Tensor], Tensor] = self._of_chunk if self.chunks else self._of_all
        if self.compiles:
            self._loss = torch.compile(self._loss)
        if self.recomputes:
            model.layers = nn.ModuleList(Recomputing(layer) for layer in model.layers)
        self.model = model
        trained = [one for one in model.parameters() if one.requires_grad]
        if self.steps_in_backward:
            self.optimizers = {one: self._optimizer([one]) for one in trained}
            for one in trained:
                one.register_post_accumulate_grad_hook(self._update)
        else:
            self.optimizer = self._optimizer(trained)

    def _optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=2e-5, fused=True)

    def _update(self, parameter: Tensor) -> None:
        optimizer = self.optimizers[parameter]
        optimizer.step()
        optimizer.zero_grad()

    def _of_all(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels)

    def _of_chunk(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), labels, reduction="sum")

    def _loss_of(self, tokens: Tensor, labels: Tensor, places: Tensor) -> Tensor:
        if not self.chunks:
            logits = self.model.logits(tokens, places)
            return self._loss(logits, self.model.shifted(labels))
        with self._saving():
            hidden = self.model.hidden(tokens, places)
        parts = [self.model.output_of(part) for part in hidden.chunk(CHUNKS, dim=1)]
        del hidden
        shifted = torch.hstack((labels[..., 1:], self.model.ignored))
        count = (shifted != -100).sum()
        total: Any = 0.0
        pieces = [part.reshape(-1) for part in shifted.chunk(CHUNKS, dim=1)]
        flat = [part.reshape(-1, part.size(-1)) for part in parts]
        for logits, targets in zip(flat, pieces, strict=True):
            total += self._loss(logits, targets)
        return total / count  # type: ignore[no-any-return]

    def _saving(self) -> AbstractContextManager[object]:
        """Return a context in which saved tensors, small ones and parameters aside, go to the CPU."""
        if not self.offloads:
            return nullcontext()

        def pack(tensor: Tensor) -> Tensor:
            is_kept = isinstance(tensor, nn.Parameter) or tensor.nbytes < SMALLEST_OFFLOADED_BYTES
            return tensor if is_kept else tensor.to("cpu")

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor.to("cuda"))

    def step(self, tokens: Tensor, labels: Tensor, places: Tensor) -> None:
        """Train on a batch."""
        tokens, labels, places = tokens.to("cuda"), labels.to("cuda"), places.to("cuda")
        count = (labels != -100).sum()
        loss = self._loss_of(tokens, labels, places) * count
        loss.backward()  # type: ignore[no-untyped-call]
        if self.steps_in_backward:
            return
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad *= 1 / count
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class Compiled(_Step):
    """Layers and loss compiled."""

    compiles = True


class Chunked(Compiled):
    """The loss in chunks."""

    chunks = True


class Recomputed(Chunked):
    """Layers recomputed."""

    recomputes = True


class StepsInBackward(Recomputed):
    """The optimizer's steps in the backward pass."""

    steps_in_backward = True


class Offloaded(StepsInBackward):
    """Saved tensors on the CPU."""

    offloads = True


class EightBit(Offloaded):
    """State of 8 bits."""

    def _optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torchao.optim.AdamW8bit(parameters, lr=2e-5)


class Lora(Recomputed):
    """Adapters alone trained."""

    offloads = True
    adapters = Adapters()


class Qlora(Lora):
    """Weights of layers in NF4."""

    adapters = Adapters(quantizes=True)


class _PagedAdamW(bitsandbytes.optim.PagedAdamW8bit):  # type: ignore[misc]
    """Paged state with a scale for 2,048 numbers, as bitsandbytes had it before 0.44."""

    def init_state(self, group: Any, p: Tensor, gindex: int, pindex: int) -> None:
        super().init_state(group, p, gindex, pindex)
        for name in ("absmax1", "absmax2"):
            if name in self.state[p]:
                self.state[p][name] = torch.zeros(-(-p.numel() // STATE_BLOCK), device=p.device)


class Full8B(StepsInBackward):
    """All weights of 8B, whose paged state of 8 bits is on the host."""

    size = LLAMA_8B

    def _optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return _PagedAdamW(parameters, lr=2e-5)


class Full8BNotRecomputed(Full8B):
    """The same without recomputation."""

    recomputes = False


class Lora8B(Recomputed):
    """Adapters of queries and values."""

    size = LLAMA_8B
    adapters = Adapters(attention=("query", "value"), mlp=(), rank=8)


class Lora8BNotRecomputed(Lora8B):
    """The same without recomputation."""

    recomputes = False


class Qlora8B(Recomputed):
    """Adapters of all layers, whose weights are in NF4."""

    size = LLAMA_8B
    adapters = Adapters(attention=("query", "key", "value", "output"), rank=8, quantizes=True)
