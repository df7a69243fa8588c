"""The rows of torchtune: Llama 3.2 3B in the modules of November 2024, with the loss of its recipe.

The loop: weights, gradients and AdamW's moments in bfloat16, texts packed into 2 x 4,096 tokens, gradients
cleared after the step. torchtune_steps.py has the rows with more flags.
"""

import csv
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import planner
from benchmarks.accuracy.rows import Row, texts
from planner.allocator.config import MemoryLimits
from planner.allocator.replay import replay_trace
from planner.capture.session import record
from planner.hardware.database import find_device
from planner.hardware.device import MIB
from planner.jobs import Job, Loss, Optimizer, ZeroGrad, parse_tensor_spec

TORCHTUNE = "torchtune"
TABLE = Path(__file__).parents[1] / "published" / "torchtune.csv"
LAYERS, WIDTH, HEADS, KEY_HEADS, INNER, VOCABULARY = 28, 3072, 24, 8, 8192, 128_256
HEAD_WIDTH = WIDTH // HEADS
LONGEST = 131_072
TOKENS = ("4096:int64",) * 3  # tokens, labels, places
NOTES = {  # by step
    "Compiled": "given to 0.1 GiB; inferred: the compiled loss of torch 2.5 held the logits in float32 once "
    "more (3.9 GiB)",
    "Recomputed": "given to 0.1 GiB; inferred: AdamW with fused=True, since its default takes 30 GiB",
}


class _Norm(nn.Module):
    """A norm that computes in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

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

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key, self.value = (nn.Linear(WIDTH, KEY_HEADS * HEAD_WIDTH, bias=False) for _ in range(2))
        self.output = nn.Linear(WIDTH, WIDTH, bias=False)
        self.attend = partial(F.scaled_dot_product_attention, is_causal=True)

    def forward(self, x: Tensor, cache: Tensor, places: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = _rotate(self.query(x).view(batch, length, HEADS, HEAD_WIDTH), cache, places).transpose(1, 2)
        k, v = (layer(x).view(batch, length, -1, HEAD_WIDTH) for layer in (self.key, self.value))
        k, v = _rotate(k, cache, places).transpose(1, 2), v.transpose(1, 2)
        each = (batch, KEY_HEADS, HEADS // KEY_HEADS, -1, HEAD_WIDTH)
        k, v = (one.unsqueeze(2).expand(each).flatten(1, 2) for one in (k, v))
        mixed = self.attend(q, k, v)
        return self.output(mixed.transpose(1, 2).contiguous().view(batch, length, -1))  # type: ignore[no-any-return]


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.attention_norm, self.norm = _Attention(), _Norm(), _Norm()
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor, cache: Tensor, places: Tensor) -> Tensor:
        h = self.attention(self.attention_norm(x), cache, places) + x
        wide = self.norm(h)
        inner = F.silu(self.gate(wide))
        inner = inner * self.up(wide)
        return h + self.down(inner)  # type: ignore[no-any-return]


class Llama(nn.Module):
    """The model with its loss, whose output layer shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(_Layer() for _ in range(LAYERS))
        self.norm = _Norm()
        self.register_buffer("cache", torch.zeros(LONGEST, HEAD_WIDTH // 2, 2), persistent=False)
        self.register_buffer("ignored", torch.full((2, 1), -100), persistent=False)

    def forward(self, tokens: Tensor, labels: Tensor, places: Tensor) -> Tensor:
        loss = F.cross_entropy(self._logits(tokens, places), self._shifted(labels))
        return loss * (labels != -100).sum()

    def _shifted(self, labels: Tensor) -> Tensor:
        return torch.hstack((labels[..., 1:], self.ignored)).reshape(-1)

    def _hidden(self, tokens: Tensor, places: Tensor) -> Tensor:
        h = self.embedding(tokens)
        for layer in self.layers:
            h = layer(h, self.cache, places)
        return self.norm(h)  # type: ignore[no-any-return]

    def _logits(self, tokens: Tensor, places: Tensor) -> Tensor:
        logits = F.linear(self._hidden(tokens, places), self.embedding.weight).float()
        return logits.reshape(-1, logits.size(-1))


def torchtune_rows() -> list[Row]:
    """Return peak active memory, which is peak allocated (B) where one stream runs."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        return [_row(line) for line in csv.DictReader(file)]


def _row(line: Mapping[str, str]) -> Row:
    model, gpu, batch = line["model"], line["gpu"], int(line["batch"])
    peak_mib = _step_peak_mib(line["step"], batch, gpu) if line["step"] else _eager_peak_mib(batch, gpu)
    case = f"{model} {line['task']} {batch} x {line['length']} ({line['setting']})"
    truth, estimates = f"{float(line['value_gib']) * 1024}", texts({"planner": peak_mib})
    note = NOTES.get(line["step"], "given to 0.1 GiB")
    return Row(TORCHTUNE, "B", model, case, "transformer", gpu, batch, truth, estimates, note=note)


def _step_peak_mib(step: str, batch: int, gpu: str) -> float:
    """Return the peak of later steps of a class of torchtune_steps.py, with what it compiles compiled."""
    file = Path(__file__).with_name("torchtune_steps.py")
    result = planner.estimate(f"{file}:{step}", batch, gpu=gpu, input=TOKENS, compile="default")
    peak_mib: float = result.to_dict()["peak_later_steps_mib"]
    return peak_mib


def _eager_peak_mib(batch: int, gpu: str) -> float:
    """Return the peak of later steps of the recipe without a flag."""
    target = find_device(gpu).target
    job = Job(
        "Llama-3.2-3B",
        inputs=tuple(parse_tensor_spec(text) for text in TOKENS),
        loss=Loss.OUTPUT,
        optimizer=Optimizer.ADAMW,
        zero_grad=ZeroGrad.AFTER_STEP,
    )
    trace = record(job, batch, target.capability, lambda job: _build(), sm_count=target.sm_count)
    peak = replay_trace(trace, MemoryLimits()).later_steps
    assert peak is not None
    return peak.allocated_bytes / MIB


def _build() -> nn.Module:
    """Build the model in bfloat16, the cache of its rotations in float32."""
    with torch.device("meta"):
        model = Llama()
    cache = model.cache
    model.bfloat16()
    model.cache = cache
    return model
