"""Train a small Llama by transformers' Trainer, sharded by FSDP2.

torchrun --nproc-per-node 2 fsdp_trainer.py --batch-size 8
"""

import argparse
import tempfile
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

TOKENS = 512


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Samples of as many tokens, the last of which is padding."""

    def __len__(self) -> int:
        """Return how many there are."""
        return 2048

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return a sample."""
        ids = torch.full((TOKENS,), index % 1000)
        mask = torch.ones_like(ids)
        mask[-1] = 0
        return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def make_trainer(
    batch_size: int = 8,
    precision: str = "bf16",
    accumulate: int = 1,
    keep: bool = False,
    checkpoint: bool = False,
    norm: float = 1.0,
) -> Trainer:
    """Return the trainer, whose model `Trainer.train` shards."""
    config = LlamaConfig(
        num_hidden_layers=3, hidden_size=512, intermediate_size=1408, num_attention_heads=8,
        num_key_value_heads=2, vocab_size=16000,
    )  # fmt: skip
    sharding: dict[str, Any] = {"reshard_after_forward": not keep, "activation_checkpointing": checkpoint}
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        fsdp=True,
        fsdp_config=sharding,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=accumulate,
        bf16=precision == "bf16",
        max_grad_norm=norm,
        max_steps=3,
        report_to="none",
        save_strategy="no",
        dataloader_drop_last=True,
    )
    return Trainer(LlamaForCausalLM(config), arguments, train_dataset=Tokens())


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--checkpoint", action="store_true")
    parser.add_argument("--norm", type=float, default=1.0)
    make_trainer(**vars(parser.parse_args())).train()


if __name__ == "__main__":
    main()
