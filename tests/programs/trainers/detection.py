"""Detection: labels are a list of dictionaries, one for each image."""

import torch
from transformers import Trainer, TrainingArguments, YolosConfig, YolosForObjectDetection


def collate(batch):
    return {
        "pixel_values": torch.stack([one["pixel_values"] for one in batch]),
        "labels": [one["labels"] for one in batch],
    }


def make_trainer():
    config = YolosConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, image_size=[32, 32],
        patch_size=16, num_detection_tokens=5, num_labels=4,
    )  # fmt: skip
    boxes = {"class_labels": torch.tensor([1, 2]), "boxes": torch.rand(2, 4)}
    rows = [{"pixel_values": torch.zeros(3, 32, 32), "labels": boxes}] * 5
    args = TrainingArguments("out", remove_unused_columns=False, report_to="none")
    return Trainer(YolosForObjectDetection(config), args, data_collator=collate, train_dataset=rows)
