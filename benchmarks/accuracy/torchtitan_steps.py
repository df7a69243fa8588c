"""A training step as torchtitan of 26 December 2024 makes it, for Llama 3.1 8B under FSDP2.

Parameters in float32, gathered in bfloat16 and reduced in float32; blocks are sharded one by one, the last is
kept after its forward pass. Of each block every second product and attention are saved, the rest is computed
again. Attention is flash attention, which torch of that day chose on an H100.
"""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

LAYERS, WIDTH, HEADS, KEY_HEADS, INNER, VOCABULARY, LENGTH = 32, 4096, 32, 8, 14336, 128_256, 8192
HEAD_WIDTH = WIDTH // HEADS
_PRODUCT = torch.ops.aten.mm.default
_SAVED = {
    _PRODUCT,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
}


class _Norm(nn.Module):
    """A norm that computes in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return normed.type_as(x) * self.weight


def _rotate(x: Tensor, turns: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[: x.shape[1]].view(1, x.shape[1], 1, -1)).flatten(3).type_as(x)


def _repeat(x: Tensor) -> Tensor:
    batch, length, _, width = x.shape
    groups = x[:, :, :, None, :].expand(batch, length, KEY_HEADS, HEADS // KEY_HEADS, width)
    return groups.reshape(batch, length, HEADS, width)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.output = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(WIDTH, KEY_HEADS * HEAD_WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.query(x), self.key(x), self.value(x)
        q, k, v = (one.view(batch, length, -1, HEAD_WIDTH) for one in (q, k, v))
        q, k = _rotate(q, turns), _rotate(k, turns)
        k, v = _repeat(k), _repeat(v)
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(mixed.transpose(1, 2).contiguous().view(batch, length, -1))  # type: ignore[no-any-return]


class _Block(nn.Module):
    """A block that is partly computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.attention_norm, self.norm = _Attention(), _Norm(), _Norm()
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def _run(self, x: Tensor, turns: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), turns)
        wide = self.norm(h)
        return h + self.down(F.silu(self.gate(wide)) * self.up(wide))  # type: ignore[no-any-return]

    def forward(self, x: Tensor, turns: Tensor) -> Any:
        return checkpoint(
            self._run, x, turns, use_reentrant=False, preserve_rng_state=False, context_fn=_contexts
        )


def _contexts() -> Any:
    """Return the contexts that save every second product and attention."""
    products: dict[bool, int] = defaultdict(int)

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator is _PRODUCT:
            products[context.is_recompute] += 1
        is_second = operator is _PRODUCT and products[context.is_recompute] % 2 == 0
        is_saved = operator in _SAVED and not is_second
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class _Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("turns", torch.empty(LENGTH, HEAD_WIDTH // 2, dtype=torch.complex64))
        self.layers = nn.ModuleList(_Block() for _ in range(LAYERS))
        self.norm = _Norm()
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        for layer in self.layers:
            h = layer(h, self.turns)
        return self.output(self.norm(h))  # type: ignore[no-any-return]


class Selective:
    """A rank of FSDP2 over all ranks, which saves selected operators."""

    is_compiled = False

    def __init__(self) -> None:
        torch.distributed.init_process_group("nccl")
        mesh = init_device_mesh("cuda", (torch.distributed.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        with torch.device("meta"):
            model = _Llama()
        for number, layer in enumerate(model.layers):
            if self.is_compiled:
                layer.compile(fullgraph=True)
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=number < LAYERS - 1)
        self.model: Any = fully_shard(model, mesh=mesh, mp_policy=policy)
        self.model.to_empty(device="cuda")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, foreach=True)

    def step(self, tokens: Tensor, labels: Tensor) -> None:
        """Train on a batch."""
        tokens, labels = tokens.to("cuda"), labels.to("cuda")
        self.optimizer.zero_grad()
        logits = self.model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))
        del logits
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()


class Compiled(Selective):
    """A rank of the same run, with each block compiled."""

    is_compiled = True
