"""Train a vision transformer with transformers' Trainer in float16, accumulating two batches a step."""

from tempfile import mkdtemp

import torch
from transformers import Trainer, TrainingArguments, ViTConfig, ViTForImageClassification


class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 96

    def __getitem__(self, index):
        return {"pixel_values": torch.full((3, 224, 224), index / 96), "labels": index % 10}


def make():
    arguments = TrainingArguments(
        mkdtemp(),
        max_steps=3,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        fp16=True,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        report_to=[],
        remove_unused_columns=False,
    )
    model = ViTForImageClassification(ViTConfig(num_hidden_layers=6, num_labels=10))
    return Trainer(model, arguments, train_dataset=Images(), eval_dataset=Images())


if __name__ == "__main__":
    make().train()
