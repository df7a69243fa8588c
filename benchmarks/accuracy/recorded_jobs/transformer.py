"""A language model of equal blocks: norms in float32, rotary embeddings, attention and loss written out.

Weights are applied by einsum; AdamW works parameter by parameter and keeps moments that it makes anew. A step
starts without the gradients and the names of the step before, unless nothing is updated: then the gradients
accumulate, and the names live until the step replaces them.
"""

import math

import torch
from torch import Tensor, nn

DEVICE = "cuda"


class Weights(nn.Module):
    """A matrix of weights for the last dimension, without a bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(nn.init.trunc_normal_(torch.empty(outputs, inputs)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.matrix)


class Table(nn.Module):
    """A row of weights for each token."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.rows = nn.Parameter(nn.init.trunc_normal_(torch.empty(tokens, width)))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.rows[tokens]


class Norm(nn.Module):
    """Scale by the root of the mean square, in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        given = x.dtype
        x = x.to(torch.float32)
        factor = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        x = x * factor
        return (self.gain * x).to(given)


class Rotation(nn.Module):
    """Rotate pairs of features by the position."""

    table: Tensor

    def __init__(self, positions: int, features: int) -> None:
        super().__init__()
        speeds = 10_000.0 ** -(torch.arange(0, features, 2) / features)
        angles = torch.outer(torch.arange(positions), speeds)
        self.register_buffer("table", torch.stack([angles.cos(), angles.sin()]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        even, odd = x.reshape(*x.shape[:-1], -1, 2).movedim(-1, 0)
        cosines, sines = self.table[:, : x.shape[-2]]
        first = cosines * even - sines * odd
        second = sines * even + cosines * odd
        return torch.stack([first, second], dim=-1).flatten(-2)


def softmax(x: Tensor) -> Tensor:
    """Return the softmax over the last dimension."""
    shifted = x - torch.max(x, dim=-1, keepdim=True)[0]
    powers = torch.exp(shifted)
    return powers / torch.sum(powers, dim=-1, keepdim=True)


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Return the values weighted by how queries and keys match where the mask allows it."""
    scores = torch.einsum("...qd,...kd->...qk", queries, keys) / math.sqrt(keys.shape[-1])
    scores = torch.where(mask, scores, float("-inf"))
    weights = softmax(scores)
    return torch.einsum("...qk,...kd->...qd", weights, values)


class SelfAttention(nn.Module):
    """Attention of several heads to earlier positions."""

    def __init__(self, width: int, heads: int, rotation: Rotation) -> None:
        super().__init__()
        self.heads = heads
        self.queries, self.keys, self.values = (Weights(width, width) for _ in range(3))
        self.output = Weights(width, width)
        self.rotation = rotation

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[-2]
        queries, keys, values = self.queries(x), self.keys(x), self.values(x)
        queries, keys, values = (
            one.unflatten(-1, (self.heads, -1)).transpose(-2, -3) for one in (queries, keys, values)
        )
        queries = self.rotation(queries)
        keys = self.rotation(keys)
        positions = torch.arange(length, device=x.device)
        mask = positions[:, None] >= positions[None, :]
        mixed = attend(queries, keys, values, mask)
        mixed = mixed.transpose(-2, -3).flatten(-2)
        return self.output(mixed)


class GatedLayers(nn.Module):
    """Two layers, the first one with a gate of SiLU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.first, self.second, self.gate = (
            Weights(width, hidden),
            Weights(hidden, width),
            Weights(width, hidden),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.second(silu(self.first(x)) * self.gate(x))


def silu(x: Tensor) -> Tensor:
    """Return x times its sigmoid."""
    return x * torch.sigmoid(x)


class Block(nn.Module):
    """Attention and gated layers, each after a norm and added to its input."""

    def __init__(self, width: int, hidden: int, heads: int, rotation: Rotation) -> None:
        super().__init__()
        self.attention = SelfAttention(width, heads, rotation)
        self.layers = GatedLayers(width, hidden)
        self.norm_1, self.norm_2 = Norm(width), Norm(width)

    def forward(self, x: Tensor) -> Tensor:
        attended = self.attention(self.norm_1(x))
        after = x + attended
        layered = self.layers(self.norm_2(after))
        return after + layered


class Model(nn.Module):
    """The language model."""

    def __init__(
        self, width: int, hidden: int, layers: int, heads: int, vocabulary: int, context: int
    ) -> None:
        super().__init__()
        rotation = Rotation(context, width // heads)
        self.table = Table(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, hidden, heads, rotation) for _ in range(layers))
        self.norm = Norm(width)
        self.head = Weights(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.table(tokens)
        x = embedded
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.head(x)


def log_softmax(x: Tensor) -> Tensor:
    """Return the logarithm of the softmax over the last dimension."""
    highest = torch.max(x, dim=-1, keepdim=True)[0]
    x = x - highest
    return x - torch.log(torch.sum(torch.exp(x), dim=-1, keepdim=True))


def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy."""
    negative = -log_softmax(scores)
    return torch.mean(torch.gather(negative, -1, targets.unsqueeze(-1)))


class AdamW(torch.optim.Optimizer):
    """AdamW whose moments are made anew in each step."""

    def __init__(self, parameters: object) -> None:
        super().__init__(parameters, {"lr": 1e-3})  # type: ignore[arg-type]

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is None:
                    continue
                gradient, state = one.grad.data, self.state[one]
                one.data -= group["lr"] * 0.01 * one.data
                before = state.get("first", torch.zeros_like(one))
                before_2 = state.get("second", torch.zeros_like(one))
                first = 0.9 * before + 0.1 * gradient
                second = 0.999 * before_2 + 0.001 * torch.square(gradient)
                one.data -= group["lr"] * first / (torch.sqrt(second) + 1e-8)
                state["first"], state["second"] = first, second


class Training:
    """The loop's model, optimizer, first batch and names."""

    def __init__(
        self,
        width: int = 1024,
        hidden: int = 4096,
        layers: int = 24,
        heads: int = 16,
        vocabulary: int = 10_000,
        context: int = 1024,
        trains: bool = True,
        updates: bool = True,
        in_bfloat16: bool = False,
        other_batches: int = 0,
    ) -> None:
        self.model = Model(width, hidden, layers, heads, vocabulary, context).to(DEVICE)
        self.optimizer = AdamW(self.model.parameters())
        self.trains, self.updates, self.in_bfloat16 = trains, updates, in_bfloat16
        self.other_batches = other_batches
        self.tokens: Tensor | None = None
        self.scores: Tensor | None = None
        self.loss: Tensor | None = None

    def step(self, tokens: Tensor, targets: Tensor) -> None:
        """Run one pass over the first batch, which stays on the GPU."""
        if self.tokens is None:
            self.tokens, self.other_tokens = self._first_and_others(tokens)
            if self.trains:
                self.targets, self.other_targets = self._first_and_others(targets)
        if self.updates:
            self.scores = self.loss = None
            self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=self.in_bfloat16):
            if not self.trains:
                with torch.inference_mode():
                    self.model(self.tokens)
                return
            self.scores = self.model(self.tokens)
            self.loss = loss_of(self.scores, self.targets)
        self.loss.backward()
        if self.updates:
            self.optimizer.step()

    def _first_and_others(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Return the batch of the passes and the ones that lie beside it."""
        others = torch.zeros(self.other_batches, *batch.shape, dtype=batch.dtype, device=DEVICE)
        return batch.to(DEVICE), others
