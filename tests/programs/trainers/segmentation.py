"""Segmentation: images by a transform of the dataset, predictions brought to the labels' size for metrics."""

import numpy as np
import torch
from datasets import Dataset
from torch import nn
from transformers import (
    SegformerConfig,
    SegformerForSemanticSegmentation,
    Trainer,
    TrainingArguments,
)


def compute_metrics(prediction):
    logits, labels = prediction
    classes = nn.functional.interpolate(
        torch.from_numpy(logits), size=labels.shape[-2:], mode="bilinear", align_corners=False
    ).argmax(dim=1)
    return {"accuracy": float((classes.numpy() == labels).mean())}


def transform(batch):
    images = [torch.from_numpy(np.full((3, 64, 64), value, np.float32)) for value in batch["value"]]
    return {"pixel_values": images, "labels": [torch.zeros(64, 64, dtype=torch.int64) for _ in images]}


def make_trainer():
    config = SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[4, 2], hidden_sizes=[16, 32],
        num_attention_heads=[1, 2], patch_sizes=[7, 3], strides=[4, 2], mlp_ratios=[2, 2],
        decoder_hidden_size=32, num_labels=5,
    )  # fmt: skip
    rows = Dataset.from_dict({"value": [0.0, 0.5, 1.0, 0.25]})
    rows.set_transform(transform)
    args = TrainingArguments(
        "out", per_device_train_batch_size=2, per_device_eval_batch_size=2, eval_strategy="steps",
        eval_steps=20, eval_accumulation_steps=5, remove_unused_columns=False, report_to="none",
    )  # fmt: skip
    return Trainer(
        SegformerForSemanticSegmentation(config), args, train_dataset=rows, eval_dataset=rows,
        compute_metrics=compute_metrics,
    )  # fmt: skip
