"""Steps of torchtune's recipes of November 2024 over the modules of torchtune.py, one for each row.

Each row adds to the one before: layers and loss compiled, the loss in eight chunks, layers recomputed,
the optimizer's steps in the backward pass, saved tensors on the CPU; LoRA has them all but the optimizer's.
Packed texts are attended to by flex_attention, which is compiled by itself: the layers' code breaks there.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from benchmarks.accuracy.torchtune import Llama

RANK, SCALE, CHUNKS = 64, 2.0, 8
SMALLEST_OFFLOADED_BYTES = 1024


class _Recomputed(nn.Module):
    """A layer whose activations are computed again in the backward pass."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any) -> Any:
        return checkpoint(self.layer, *args, use_reentrant=False)


class _Lora(nn.Module):
    """A linear layer with an adapter of low rank beside it; its own weight is not trained."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.weight = base.weight
        self.a = nn.Linear(base.in_features, RANK, bias=False)
        self.b = nn.Linear(RANK, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = F.linear(x, self.weight)
        return out + SCALE * self.b(self.a(x))


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _add_adapters(model: Llama) -> None:
    """Add adapters to queries, values, outputs and all of the MLPs, as the recipe's configuration does."""
    for layer in model.layers:
        attention: Any = layer.attention
        for module, names in ((attention, ("query", "value", "output")), (layer, ("gate", "up", "down"))):
            for name in names:
                setattr(module, name, _Lora(getattr(module, name)))


class _Step:
    """A step of a recipe with its model and optimizer."""

    compiles = chunks = recomputes = steps_in_backward = offloads = adapts = False

    def __init__(self) -> None:
        with torch.device("cuda"):
            model = Llama()
            if self.adapts:
                _add_adapters(model)
        cache = model.cache
        model.bfloat16()
        model.cache = cache
        if self.adapts:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(".a." in name or ".b." in name)
        if self.compiles:
            for layer in model.layers:
                layer.attention.attend = torch.compiler.disable(_attend)
                layer.compile()
        self._loss: Callable[[Tensor, Tensor], Tensor] = self._of_chunk if self.chunks else self._of_all
        if self.compiles:
            self._loss = torch.compile(self._loss)
        if self.recomputes:
            model.layers = nn.ModuleList(_Recomputed(layer) for layer in model.layers)
        self.model = model
        trained = [one for one in model.parameters() if one.requires_grad]
        if self.steps_in_backward:
            self.optimizers = {one: torch.optim.AdamW([one], lr=2e-5, fused=True) for one in trained}
            for one in trained:
                one.register_post_accumulate_grad_hook(self._update)
        else:
            self.optimizer = torch.optim.AdamW(trained, lr=2e-5, fused=True)

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
            logits = self.model._logits(tokens, places)
            return self._loss(logits, self.model._shifted(labels))
        with self._saving():
            hidden = self.model._hidden(tokens, places)
        parts = [F.linear(part, self.model.embedding.weight) for part in hidden.chunk(CHUNKS, dim=1)]
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


class Lora(Recomputed):
    """Adapters alone trained."""

    adapts = offloads = True
