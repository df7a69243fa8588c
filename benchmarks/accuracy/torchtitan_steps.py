"""Training steps as torchtitan of 26 December 2024 makes them, for Llama 3.1 under FSDP2.

Parameters in float32, gathered in bfloat16 and reduced in float32; blocks are sharded one by one, the last is
kept after its forward pass. Of each block every second product and attention are saved, the rest is computed
again, or all of it is. Attention is flash attention, which torch of that day chose on an H100. Float8 is
torchao's, of all linear layers but the last, whose weights FSDP2 gathers in float8. 70B is also split over
the GPUs of a node by tensor, sequence and loss parallel.
"""

from collections import defaultdict
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_tensor_parallel import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
)

KEY_HEADS, VOCABULARY, HEAD_WIDTH = 8, 128_256, 128
_PRODUCT = torch.ops.aten.mm.default
_SAVED = {
    _PRODUCT,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
}


class Size(NamedTuple):
    """Sizes of one Llama."""

    layers: int
    width: int
    inner: int


LLAMA_8B, LLAMA_70B = Size(32, 4096, 14_336), Size(80, 8192, 28_672)


class _Norm(nn.Module):
    """A norm that computes in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return normed.type_as(x) * self.weight


def _rotate(x: Tensor, turns: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[: x.shape[1]].view(1, x.shape[1], 1, -1)).flatten(3).type_as(x)


def _repeat(x: Tensor, times: int) -> Tensor:
    batch, length, heads, width = x.shape
    groups = x[:, :, :, None, :].expand(batch, length, heads, times, width)
    return groups.reshape(batch, length, heads * times, width)


class _Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.groups = width // HEAD_WIDTH // KEY_HEADS
        self.query, self.output = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(width, KEY_HEADS * HEAD_WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.query(x), self.key(x), self.value(x)
        q, k, v = (one.view(batch, length, -1, HEAD_WIDTH) for one in (q, k, v))
        q, k = _rotate(q, turns), _rotate(k, turns)
        k, v = _repeat(k, self.groups), _repeat(v, self.groups)
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(mixed.transpose(1, 2).contiguous().view(batch, length, -1))  # type: ignore[no-any-return]


class _Feed(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(size.width, size.inner, bias=False) for _ in range(2))
        self.down = nn.Linear(size.inner, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class _Block(nn.Module):
    """A block that is computed again in the backward pass, but for selected operators."""

    def __init__(self, size: Size, is_selective: bool) -> None:
        super().__init__()
        self.options = {"context_fn": _contexts} if is_selective else {}
        self.attention = _Attention(size.width)
        self.attention_norm, self.norm = _Norm(size.width), _Norm(size.width)
        self.feed = _Feed(size)

    def _run(self, x: Tensor, turns: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), turns)
        return h + self.feed(self.norm(h))  # type: ignore[no-any-return]

    def forward(self, x: Tensor, turns: Tensor) -> Any:
        return checkpoint(self._run, x, turns, use_reentrant=False, preserve_rng_state=False, **self.options)


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
    def __init__(self, size: Size, length: int, is_selective: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, size.width)
        self.register_buffer("turns", torch.empty(length, HEAD_WIDTH // 2, dtype=torch.complex64))
        self.layers = nn.ModuleList(_Block(size, is_selective) for _ in range(size.layers))
        self.norm = _Norm(size.width)
        self.output = nn.Linear(size.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        for layer in self.layers:
            h = layer(h, self.turns)
        return self.output(self.norm(h))  # type: ignore[no-any-return]


def _split(model: _Llama, mesh: DeviceMesh) -> None:
    """Split layers over the ranks of a mesh, and the tokens between them."""
    parts, whole = Shard(1), Replicate()
    column, row = Float8ColwiseParallel, Float8RowwiseParallel
    ends = {
        "embedding": RowwiseParallel(input_layouts=whole, output_layouts=parts),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=parts, output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, ends)
    for layer in model.layers:
        plan = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareFloat8ModuleInput(
                input_layouts=(parts, None), desired_input_layouts=(whole, None)
            ),
            **{f"attention.{name}": column() for name in ("query", "key", "value")},
            "attention.output": row(output_layouts=parts),
            "norm": SequenceParallel(),
            "feed": PrepareFloat8ModuleInput(input_layouts=(parts,), desired_input_layouts=(whole,)),
            "feed.gate": column(),
            "feed.up": column(),
            "feed.down": row(output_layouts=parts),
        }
        parallelize_module(layer, mesh, plan)


class Selective:
    """A rank of FSDP2 over all ranks, which saves selected operators."""

    size, length, split = LLAMA_8B, 8192, 1
    is_compiled = has_float8 = False
    is_selective = True

    def __init__(self) -> None:
        torch.distributed.init_process_group("nccl")
        shape = (torch.distributed.get_world_size() // self.split, self.split)
        meshes = init_device_mesh("cuda", shape, mesh_dim_names=("shards", "split"))
        with torch.device("meta"):
            model = _Llama(self.size, self.length, self.is_selective)
        if self.has_float8:
            convert_to_float8_training(
                model,
                config=Float8LinearConfig(enable_fsdp_float8_all_gather=True),
                module_filter_fn=lambda module, name: name != "output",
            )
        if self.split > 1:
            _split(model, meshes["split"])
        self.model = self._sharded(model, meshes["shards"])
        self.model.to_empty(device="cuda")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, foreach=True)

    def _sharded(self, model: _Llama, mesh: DeviceMesh) -> Any:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        last = self.size.layers - 1
        for number, layer in enumerate(model.layers):
            if self.is_compiled:
                layer.compile(fullgraph=True)
            fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=number < last)
        return fully_shard(model, mesh=mesh, mp_policy=policy)

    def step(self, tokens: Tensor, labels: Tensor) -> None:
        """Train on a batch."""
        tokens, labels = tokens.to("cuda"), labels.to("cuda")
        self.optimizer.zero_grad()
        with loss_parallel() if self.split > 1 else nullcontext():
            logits = self.model(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))
            del logits
            loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()


class Compiled(Selective):
    """A rank of the same run, with each block compiled."""

    is_compiled = True


class Float8(Compiled):
    """A step with linear layers in float8."""

    has_float8 = True


class Long(Float8):
    """A step on longer texts, all of whose blocks are computed again."""

    length = 32_768
    is_selective = False


class Split70B(Float8):
    """A rank of 70B, whose layers are split over eight."""

    size, split = LLAMA_70B, 8
    is_selective = False
