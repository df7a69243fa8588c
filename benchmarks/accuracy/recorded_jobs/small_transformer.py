"""A language model of four blocks, made on the GPU, trained by an Adam that works parameter by parameter.

Norms, rotary embeddings, attention and loss are written out, weights are applied by einsum. Each pass of the
loop predicts the token after the last position of each text.
"""

import torch
from torch import Tensor, nn

DEVICE = "cuda"
VOCABULARY, CONTEXT, WIDTH, HIDDEN, HEADS, BLOCKS = 10_000, 256, 512, 1344, 16, 4


class Weights(nn.Module):
    """A matrix of weights for the last dimension, without a bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(nn.init.trunc_normal_(torch.empty(outputs, inputs, device=DEVICE)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.matrix)


class Table(nn.Module):
    """A row of weights for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(nn.init.trunc_normal_(torch.empty(VOCABULARY, WIDTH, device=DEVICE)))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.rows[tokens]


class Norm(nn.Module):
    """Scale by the root of the mean square."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH, device=DEVICE))

    def forward(self, x: Tensor) -> Tensor:
        root = torch.sqrt(torch.mean(x**2, dim=-1, keepdim=True) + 1e-5)
        return x / root * self.gain


class Rotation(nn.Module):
    """Rotate pairs of features by the position; the tables stay on the CPU."""

    def __init__(self, features: int) -> None:
        super().__init__()
        speeds = 10_000.0 ** -(torch.arange(0, features, 2) / features)
        angles = torch.outer(torch.arange(CONTEXT), speeds)
        self.cosines, self.sines = angles.cos(), angles.sin()

    def forward(self, x: Tensor) -> Tensor:
        sines = self.sines[: x.shape[-2]].to(x.device)
        cosines = self.cosines[: x.shape[-2]].to(x.device)
        first = x[..., 0::2] * cosines - x[..., 1::2] * sines
        second = x[..., 0::2] * sines + x[..., 1::2] * cosines
        return torch.stack([first, second], dim=-1).flatten(-2)


def softmax(x: Tensor) -> Tensor:
    """Return the softmax over the last dimension."""
    highest = torch.max(x, dim=-1, keepdim=True).values
    return torch.exp(x - highest) / torch.sum(torch.exp(x - highest), dim=-1, keepdim=True)


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Return the values weighted by how queries and keys match where the mask allows it."""
    mask = mask.to(queries.device)
    scores = torch.einsum("...qd,...kd->...qk", queries, keys)
    scaled = scores / torch.sqrt(torch.tensor(queries.shape[-1]).to(queries.device))
    scaled.masked_fill_(~mask.to(torch.bool), float("-inf"))
    weights = softmax(scaled)
    return torch.einsum("...qk,...kd->...qd", weights, values)


class SelfAttention(nn.Module):
    """Attention of several heads to earlier positions."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = Weights(WIDTH, WIDTH)
        self.keys = Weights(WIDTH, WIDTH)
        self.values = Weights(WIDTH, WIDTH)
        self.output = Weights(WIDTH, WIDTH)
        self.rotation = Rotation(WIDTH // HEADS)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (HEADS, -1)).transpose(-2, -3)

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.queries(x), self.keys(x), self.values(x)
        queries, keys, values = self._heads(queries), self._heads(keys), self._heads(values)
        queries = self.rotation(queries)
        keys = self.rotation(keys)
        mask = torch.tril(torch.ones(x.shape[-2], x.shape[-2]))
        mixed = attend(queries, keys, values, mask)
        mixed = mixed.transpose(-2, -3).flatten(-2)
        return self.output(mixed)


class GatedLayers(nn.Module):
    """Two layers, the first one with a gate of SiLU."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Weights(WIDTH, HIDDEN)
        self.second = Weights(HIDDEN, WIDTH)
        self.gate = Weights(WIDTH, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.first(x)
        gated = inner * torch.sigmoid(inner)
        return self.second(gated * self.gate(x))


class Block(nn.Module):
    """Attention and gated layers, each after a norm and added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = Norm(), Norm()
        self.attention = SelfAttention()
        self.layers = GatedLayers()

    def forward(self, x: Tensor) -> Tensor:
        attended = self.attention(self.norm_1(x))
        x = x + attended
        layered = self.layers(self.norm_2(x))
        return x + layered


class Model(nn.Module):
    """The language model."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = Norm()
        self.head = Weights(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy."""
    highest = torch.max(scores, dim=-1, keepdim=True).values
    logs = scores - highest - torch.log(torch.sum(torch.exp(scores - highest), dim=-1, keepdim=True))
    chosen = torch.zeros_like(logs).scatter_(-1, targets.unsqueeze(-1), 1.0)
    return -torch.sum(logs * chosen) / scores.shape[0]


class Adam(torch.optim.Optimizer):
    """Adam with its moments from the start, out of place."""

    def __init__(self, parameters: object) -> None:
        super().__init__(parameters, {"lr": 1e-3})  # type: ignore[arg-type]
        for group in self.param_groups:
            for one in group["params"]:
                self.state[one] = {"first": torch.zeros_like(one), "second": torch.zeros_like(one)}

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is None:
                    continue
                gradient, state = one.grad.data, self.state[one]
                first = state["first"]
                state["first"] = 0.9 * first + 0.1 * gradient
                second = state["second"]
                state["second"] = 0.999 * second + 0.001 * gradient**2
                one.data = one.data - group["lr"] * (state["first"] / (torch.sqrt(state["second"]) + 1e-8))
                one.data = one.data - group["lr"] * 0.01 * one.data


class Training:
    """The loop's model, optimizer and names."""

    def __init__(self, trains: bool = True) -> None:
        self.model = Model()
        self.optimizer = Adam(self.model.parameters()) if trains else None

        self.tokens: Tensor | None = None

    def step(self, tokens: Tensor, targets: Tensor) -> None:
        """Run one pass over the first batch, which stays on the GPU."""
        if self.tokens is None:
            self.tokens = tokens.to(DEVICE)
            if self.optimizer is not None:
                self.targets = targets.to(DEVICE)
        self.model.zero_grad()
        if self.optimizer is None:
            self.model(self.tokens)
            return
        self.scores = self.model(self.tokens)
        self.loss = loss_of(self.scores[:, -1, :], self.targets)
        self.loss.backward()
        self.optimizer.step()
