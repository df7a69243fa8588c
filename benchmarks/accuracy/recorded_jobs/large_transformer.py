"""A language model of 2.7 billion parameters: forward passes with their graph, and a first training step.

Norms go over the vector norm, rotations are written into an empty tensor, the mask is an expanded one. Each
block has its own table of rotations, for as many positions as the texts have.
"""

import math

import torch
from torch import Tensor, nn

DEVICE = "cuda"
TEXTS = 4
VOCABULARY, WIDTH, HIDDEN, HEADS, BLOCKS = 10_000, 2560, 10_240, 32, 32


class Weights(nn.Module):
    """A matrix of weights for the last dimension, without a bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(nn.init.trunc_normal_(torch.empty(outputs, inputs)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("oi,...i->...o", self.matrix, x)


class Table(nn.Module):
    """A row of weights for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(nn.init.trunc_normal_(torch.empty(VOCABULARY, WIDTH)))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.rows[tokens]


class Norm(nn.Module):
    """Scale by the root of the mean square, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        given = x.dtype
        x = x.to(torch.float32)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        root = torch.sqrt(length**2 / WIDTH + 1e-5)
        x = x / root
        scaled = torch.einsum("i,...i->...i", self.gain, x)
        return scaled.to(given)


class Rotation(nn.Module):
    """Rotate pairs of features by the position."""

    table: Tensor

    def __init__(self, positions: int) -> None:
        super().__init__()
        features = WIDTH // HEADS
        speeds = 10_000.0 ** -(torch.arange(0, features, 2) / features)
        angles = torch.outer(torch.arange(positions), speeds)
        self.register_buffer("table", torch.stack([angles.cos(), angles.sin()]), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        cosines = self.table[0][positions]
        sines = self.table[1][positions]
        rotated = torch.empty_like(x)
        rotated[..., 0::2] = x[..., 0::2] * cosines - x[..., 1::2] * sines
        rotated[..., 1::2] = x[..., 0::2] * sines + x[..., 1::2] * cosines
        return rotated


def softmax(x: Tensor) -> Tensor:
    """Return the softmax over the last dimension."""
    highest = torch.max(x, dim=-1, keepdim=True).values
    powers = torch.exp(x - highest)
    total = torch.sum(powers, dim=-1, keepdim=True)
    return powers / total


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Return the values weighted by how queries and keys match where the mask allows it."""
    scores = torch.einsum("...qd,...kd->...qk", queries, keys)
    scores = scores / math.sqrt(queries.shape[-1])
    scores = scores.masked_fill(mask == 0, float("-inf"))
    weights = softmax(scores)
    return torch.einsum("...qk,...kd->...qd", weights, values)


class SelfAttention(nn.Module):
    """Attention of several heads to earlier positions."""

    def __init__(self, positions: int) -> None:
        super().__init__()
        self.queries, self.keys, self.values = (Weights(WIDTH, WIDTH) for _ in range(3))
        self.output = Weights(WIDTH, WIDTH)
        self.rotation = Rotation(positions)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        queries, keys, values = self.queries(x), self.keys(x), self.values(x)
        heads_of_queries = queries.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        heads_of_keys = keys.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        heads_of_values = values.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        positions = torch.arange(length, device=x.device)
        expanded = positions.expand(batch, 1, length)
        turned_queries = self.rotation(heads_of_queries, expanded)
        turned_keys = self.rotation(heads_of_keys, expanded)
        mask = torch.triu(torch.ones(length, length, device=x.device), diagonal=1).bool()
        mask = ~mask
        mixed = attend(turned_queries, turned_keys, heads_of_values, mask.expand(batch, HEADS, -1, -1))
        mixed = mixed.transpose(1, 2).flatten(-2)
        return self.output(mixed)


class GatedLayers(nn.Module):
    """Two layers, the first one with a gate of SiLU."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate = Weights(WIDTH, HIDDEN), Weights(WIDTH, HIDDEN)
        self.second = Weights(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.first(x)
        gate = self.gate(x)
        inner = torch.sigmoid(inner) * inner
        return self.second(inner * gate)


class Block(nn.Module):
    """Attention and gated layers, each after a norm and added to its input."""

    def __init__(self, positions: int) -> None:
        super().__init__()
        self.norm_1 = Norm()
        self.attention = SelfAttention(positions)
        self.norm_2 = Norm()
        self.layers = GatedLayers()

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm_1(x)
        out = self.attention(out)
        x = x + out
        out = self.norm_2(x)
        out = self.layers(out)
        return x + out


class Model(nn.Module):
    """The language model."""

    def __init__(self, positions: int) -> None:
        super().__init__()
        self.table = Table()
        self.blocks = nn.ModuleList(Block(positions) for _ in range(BLOCKS))
        self.norm = Norm()
        self.head = Weights(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Passes:
    """Forward passes over one batch, made before; each begins without the graph of the pass before.

    With `empties_cache` each begins with an empty cache as well.
    """

    def __init__(self, length: int, in_bfloat16: bool = False, empties_cache: bool = False) -> None:
        self.model = Model(length).to(DEVICE)
        self.tokens = torch.zeros(TEXTS, length, dtype=torch.int64, device=DEVICE)
        self.in_bfloat16, self.empties_cache = in_bfloat16, empties_cache
        self.scores: Tensor | None = None

    def step(self, _: Tensor) -> None:
        """Run one pass."""
        self.scores = None
        if self.empties_cache:
            torch.cuda.empty_cache()
        with torch.autocast(DEVICE, torch.bfloat16, enabled=self.in_bfloat16):
            self.scores = self.model(self.tokens)


def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy; the places are counted on the CPU."""
    scores, targets = scores.flatten(0, 1), targets.flatten()
    highest = torch.max(scores, dim=-1, keepdim=True).values
    shifted = scores - highest
    total = torch.sum(torch.exp(shifted), dim=-1)
    chosen = shifted[torch.arange(len(targets)), targets]
    losses = torch.log(total) - chosen
    return losses.mean()


class AdamW(torch.optim.Optimizer):
    """AdamW that works parameter by parameter, in place."""

    def __init__(self, parameters: object) -> None:
        super().__init__(parameters, {"lr": 1e-3})  # type: ignore[arg-type]

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                gradient, state = one.grad.data, self.state[one]
                if not state:
                    state["first"], state["second"] = torch.zeros_like(one), torch.zeros_like(one)
                state["first"].mul_(0.9).add_(gradient, alpha=0.1)
                state["second"].mul_(0.999).addcmul_(gradient, gradient, value=0.001)
                divisor = (state["second"].sqrt() / math.sqrt(0.001)).add_(1e-8)
                one.data.addcdiv_(state["first"], divisor, value=-group["lr"])


class FirstSteps(Passes):
    """First steps of a training, each without the gradients and moments of the one before.

    The first `passes` of them are forward passes alone.
    """

    def __init__(self, length: int, passes: int = 0, empties_cache: bool = False) -> None:
        super().__init__(length, empties_cache=empties_cache)
        self.optimizer = AdamW(self.model.parameters())
        self.passes = passes
        self.loss: Tensor | None = None

    def step(self, tokens: Tensor) -> None:
        """Run one step, whose targets are the tokens."""
        self.loss = None
        self.optimizer.state.clear()
        self.optimizer.zero_grad(set_to_none=True)
        super().step(tokens)
        self.passes -= 1
        if self.passes < 0:
            assert self.scores is not None
            self.loss = loss_of(self.scores, self.tokens)
            self.loss.backward()
            self.optimizer.step()
