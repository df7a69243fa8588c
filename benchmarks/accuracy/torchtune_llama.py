"""torchtune's Llama of autumn 2024, redone in plain PyTorch, with the loss of its recipe."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LONGEST = 131_072
VOCABULARY = 128_256


@dataclass(frozen=True, slots=True)
class Size:
    """The sizes of a Llama."""

    layers: int
    width: int
    heads: int
    inner: int
    key_heads: int = 8
    shares_output: bool = False  # the embedding's weight is also that of the output

    @property
    def head_width(self) -> int:
        """Return the width of a head of attention."""
        return self.width // self.heads


LLAMA_3B = Size(28, 3072, 24, 8192, shares_output=True)
LLAMA_8B = Size(32, 4096, 32, 14_336)
LLAMA_70B = Size(80, 8192, 64, 28_672)
LLAMA_405B = Size(126, 16_384, 128, 53_248)


class Norm(nn.Module):
    """A norm that computes in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x)
        return normed * self.scale


def _rotate(x: Tensor, cache: Tensor, places: Tensor) -> Tensor:
    """Rotate pairs by their places, in float32."""
    pairs = x.float().reshape(*x.shape[:-1], -1, 2)
    angles = cache[places].view(-1, pairs.size(1), 1, pairs.size(3), 2)
    first = pairs[..., 0] * angles[..., 0] - pairs[..., 1] * angles[..., 1]
    second = pairs[..., 1] * angles[..., 0] + pairs[..., 0] * angles[..., 1]
    return torch.stack([first, second], -1).flatten(3).type_as(x)


class _Attention(nn.Module):
    """Attention by a fused kernel, which keeps q, k, v and the output as torchtune's flex_attention does."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width, keys_width = size.width, size.key_heads * size.head_width
        self.size = size
        self.query = nn.Linear(width, width, bias=False)
        self.key, self.value = (nn.Linear(width, keys_width, bias=False) for _ in range(2))
        self.output = nn.Linear(width, width, bias=False)
        self.attend = partial(F.scaled_dot_product_attention, is_causal=True)

    def forward(self, x: Tensor, cache: Tensor, places: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads, key_heads, head_width = self.size.heads, self.size.key_heads, self.size.head_width
        q = _rotate(self.query(x).view(batch, length, heads, head_width), cache, places).transpose(1, 2)
        k, v = (layer(x).view(batch, length, -1, head_width) for layer in (self.key, self.value))
        k, v = _rotate(k, cache, places).transpose(1, 2), v.transpose(1, 2)
        each = (batch, key_heads, heads // key_heads, -1, head_width)
        k, v = (one.unsqueeze(2).expand(each).flatten(1, 2) for one in (k, v))
        mixed = self.attend(q, k, v)
        return self.output(mixed.transpose(1, 2).contiguous().view(batch, length, -1))  # type: ignore[no-any-return]


class _Layer(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention = _Attention(size)
        self.attention_norm, self.norm = Norm(size.width), Norm(size.width)
        self.gate, self.up = (nn.Linear(size.width, size.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(size.inner, size.width, bias=False)

    def forward(self, x: Tensor, cache: Tensor, places: Tensor) -> Tensor:
        h = self.attention(self.attention_norm(x), cache, places) + x
        wide = self.norm(h)
        inner = F.silu(self.gate(wide))
        inner = inner * self.up(wide)
        return h + self.down(inner)  # type: ignore[no-any-return]


class Llama(nn.Module):
    """The model with its loss."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, size.width)
        self.layers = nn.ModuleList(_Layer(size) for _ in range(size.layers))
        self.norm = Norm(size.width)
        self.output = None if size.shares_output else nn.Linear(size.width, VOCABULARY, bias=False)
        cache = torch.zeros(LONGEST, size.head_width // 2, 2, dtype=torch.float32)
        self.register_buffer("cache", cache, persistent=False)
        self.register_buffer("ignored", torch.full((2, 1), -100), persistent=False)

    def forward(self, tokens: Tensor, labels: Tensor, places: Tensor) -> Tensor:
        loss = F.cross_entropy(self.logits(tokens, places), self.shifted(labels))
        return loss * (labels != -100).sum()

    def output_of(self, hidden: Tensor) -> Tensor:
        """Return the logits of the last layer's output."""
        return F.linear(hidden, (self.output or self.embedding).weight)

    def shifted(self, labels: Tensor) -> Tensor:
        """Return the labels of each place's next token."""
        return torch.hstack((labels[..., 1:], self.ignored)).reshape(-1)

    def hidden(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Return the output of the last layer."""
        h = self.embedding(tokens)
        for layer in self.layers:
            h = layer(h, self.cache, places)
        return self.norm(h)  # type: ignore[no-any-return]

    def logits(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Return all logits in float32, a row for each token."""
        logits = self.output_of(self.hidden(tokens, places)).float()
        return logits.reshape(-1, logits.size(-1))
