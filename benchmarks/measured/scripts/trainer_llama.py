"""Train a small Llama with transformers' Trainer, gradient checkpointing and Adafactor, in bfloat16 weights."""

from tempfile import mkdtemp

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = torch.arange(index, index + 1024) % 32000
        return {"input_ids": ids, "labels": ids}


def make():
    config = LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16
    )
    arguments = TrainingArguments(
        mkdtemp(),
        max_steps=3,
        per_device_train_batch_size=4,
        gradient_checkpointing=True,
        optim="adafactor",
        bf16=True,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="no",
        report_to=[],
    )
    return Trainer(LlamaForCausalLM(config), arguments, train_dataset=Texts(), eval_dataset=Texts())


if __name__ == "__main__":
    make().train()
