"""Train a language model with Apple's cut cross entropy (cut-cross-entropy), which makes no logits.

    python cut_losses.py '{"batch": 4, "vocab_size": 64000, "reduction": "sum", ...}'

Labels are those of all tokens. Kernels compute nothing on an emulated GPU, so that `nonzero` finds no label
there: the script tells it how many there are.
"""

import json
import sys
from typing import Any

import torch
from activation_memory import Block
from cut_cross_entropy import linear_cross_entropy
from torch import Tensor, nn


class Training:
    """A decoder and its output layer, of which the loss takes the weight."""

    def __init__(
        self,
        vocab_size: int = 64000,
        layers: int = 3,
        dtype: str = "bfloat16",
        autocast: bool = False,
        frozen: bool = False,
        accumulate: int = 1,
        **loss: Any,
    ) -> None:
        blocks = (Block(512) for _ in range(layers))
        decoder = nn.Sequential(nn.Embedding(vocab_size, 512), *blocks, nn.LayerNorm(512))
        self.decoder = decoder.to("cuda", getattr(torch, dtype))
        self.head = nn.Linear(512, vocab_size, bias=False).to("cuda", getattr(torch, dtype))
        self.head.requires_grad_(not frozen)
        trained = [one for one in (*self.decoder.parameters(), *self.head.parameters()) if one.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4)
        self.autocast, self.accumulate, self.loss = autocast, accumulate, loss

    def step(self, ids: Tensor) -> None:
        """Run one step."""
        self.optimizer.zero_grad()
        for part in ids.to("cuda").chunk(self.accumulate):
            with torch.autocast("cuda", torch.bfloat16, enabled=self.autocast):
                hidden = self.decoder(part)
                hidden = hidden.bfloat16() if self.autocast else hidden
                loss = linear_cross_entropy(hidden, self.head.weight, part, **{"shift": True, **self.loss})
            loss.mean().backward()
        self.optimizer.step()


def count_labels() -> None:
    """Let all labels be found on an emulated GPU; with `shift`, all but the first of each text."""
    find = Tensor.nonzero

    def find_all(mask: Tensor) -> Tensor:
        find(mask)
        return torch.empty(mask.dim(), mask.numel(), dtype=torch.int64, device="cuda").t()

    Tensor.nonzero = find_all


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    batch, tokens = given.pop("batch"), given.pop("tokens", 256)
    training = Training(**given)
    count_labels()
    for _ in range(3):
        training.step(torch.zeros(batch, tokens, dtype=torch.int64))
