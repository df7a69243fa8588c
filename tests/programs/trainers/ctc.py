"""Wav2Vec2 with CTC on raw audio of several lengths, arrays of NumPy."""

import numpy as np
import torch
from transformers import Trainer, TrainingArguments, Wav2Vec2Config, Wav2Vec2ForCTC


def collate(features):
    longest = max(len(one["input_values"]) for one in features)
    values = torch.zeros(len(features), longest)
    for row, one in zip(values, features, strict=True):
        row[: len(one["input_values"])] = torch.from_numpy(one["input_values"])
    return {"input_values": values, "labels": torch.tensor([one["labels"] for one in features])}


def make_trainer():
    config = Wav2Vec2Config(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, conv_dim=(32, 32),
        conv_stride=(5, 2), conv_kernel=(10, 3), num_feat_extract_layers=2, num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2, vocab_size=32, ctc_loss_reduction="mean", mask_time_prob=0.0,
    )  # fmt: skip
    rows = [
        {"input_values": np.zeros(length, np.float32), "labels": [3, 4, 5]} for length in (2000, 8000, 4000)
    ]
    args = TrainingArguments("out", per_device_train_batch_size=2, report_to="none")
    return Trainer(Wav2Vec2ForCTC(config), args, data_collator=collate, train_dataset=rows)
