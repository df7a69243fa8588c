"""Whisper, with a dataclass as its collator: features of fixed length, labels without padding tokens."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    WhisperConfig,
    WhisperForConditionalGeneration,
)


@dataclass
class DataCollatorSpeechSeq2SeqWithPadding:
    pad: int

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = {"input_features": torch.tensor(np.stack([one["input_features"] for one in features]))}
        longest = max(len(one["labels"]) for one in features)
        padded = [one["labels"] + [-100] * (longest - len(one["labels"])) for one in features]
        batch["labels"] = torch.tensor(padded)
        return batch


def make_trainer():
    config = WhisperConfig(
        d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=200, max_source_positions=100, pad_token_id=0,
        bos_token_id=1, eos_token_id=1, decoder_start_token_id=1,
    )  # fmt: skip
    rows = [{"input_features": np.zeros((80, 200), np.float32), "labels": [1] * length} for length in (4, 12)]
    args = Seq2SeqTrainingArguments("out", gradient_checkpointing=True, max_steps=10, report_to=["none"])
    return Seq2SeqTrainer(
        args=args, model=WhisperForConditionalGeneration(config), train_dataset=rows,
        data_collator=DataCollatorSpeechSeq2SeqWithPadding(0),
    )  # fmt: skip
