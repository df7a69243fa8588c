"""Train GPT-2 with transformers' Trainer in bfloat16, with an evaluation and a checkpoint after two steps."""

from tempfile import mkdtemp

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = torch.arange(index, index + 512) % 50257
        return {"input_ids": ids, "labels": ids}


def make():
    arguments = TrainingArguments(
        mkdtemp(),
        max_steps=4,
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        bf16=True,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        logging_steps=1,
        report_to=[],
        dataloader_pin_memory=False,
    )
    return Trainer(
        GPT2LMHeadModel(GPT2Config(n_layer=6)), arguments, train_dataset=Texts(), eval_dataset=Texts()
    )


if __name__ == "__main__":
    make().train()
