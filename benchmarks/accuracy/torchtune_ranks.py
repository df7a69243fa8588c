"""A step of torchtune's LoRA recipe of 24 September 2024 on a rank of FSDP2, by its configuration.

Made on meta, layers compiled, recomputed and sharded one by one, then the rest; allocated as parts.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from benchmarks.accuracy.torchtune_llama import LLAMA_70B, Llama
from benchmarks.accuracy.torchtune_steps import CHUNKS, Adapters, Recomputing, attend, in_bfloat16


class _Chunked(Llama):
    """The model without its loss, whose logits come in chunks."""

    def forward(self, tokens: Tensor, places: Tensor) -> Any:
        return [self.output_of(part) for part in self.hidden(tokens, places).chunk(CHUNKS, dim=1)]


def _loss_of_chunk(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels, reduction="sum")


class Lora70B:
    """A rank that trains adapters of queries, keys and values."""

    def __init__(self) -> None:
        torch.distributed.init_process_group("nccl")
        mesh = init_device_mesh("cuda", (torch.distributed.get_world_size(),))
        with torch.device("meta"), in_bfloat16():
            model = _Chunked(LLAMA_70B)
            Adapters(attention=("query", "key", "value"), mlp=(), rank=16).add(model)
        for layer in model.layers:
            attention: Any = layer.attention
            attention.attend = torch.compiler.disable(attend)
            layer.compile()
        model.layers = nn.ModuleList(Recomputing(layer) for layer in model.layers)
        for layer in reversed(model.layers):
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        # FSDP2 of torch 2.5 keeps the root gathered, whatever is asked for (`_lazy_init`)
        self.model: Any = fully_shard(model, mesh=mesh, reshard_after_forward=False)
        self.model.to_empty(device="cuda")
        self._loss = torch.compile(_loss_of_chunk)
        trained = [one for one in self.model.parameters() if one.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=3e-4, fused=True)

    def step(self, tokens: Tensor, labels: Tensor, places: Tensor) -> None:
        """Train on a batch."""
        tokens, labels, places = tokens.to("cuda"), labels.to("cuda"), places.to("cuda")
        self._loss_of(tokens, labels, places).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _loss_of(self, tokens: Tensor, labels: Tensor, places: Tensor) -> Tensor:
        parts = self.model(tokens, places)
        shifted = torch.hstack((labels[..., 1:], self.model.ignored))
        count = (shifted != -100).sum()
        total: Any = 0.0
        pieces = [part.reshape(-1) for part in shifted.chunk(CHUNKS, dim=1)]
        for logits, targets in zip(parts, pieces, strict=True):
            total += self._loss(logits.reshape(-1, logits.size(-1)), targets)
        return total / count  # type: ignore[no-any-return]
