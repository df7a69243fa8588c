"""Translation with Seq2SeqTrainer and a collator that pads to the longest of the batch."""

import torch
from datasets import Dataset
from torch.nn.utils.rnn import pad_sequence
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration


def collate(features):
    ids = [torch.tensor(one["input_ids"]) for one in features]
    labels = [torch.tensor(one["labels"]) for one in features]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(one) for one in ids], batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }


def make_trainer():
    config = T5Config(
        d_model=64, d_kv=32, d_ff=64, num_layers=1, num_heads=2, vocab_size=100, decoder_start_token_id=0
    )
    rows = Dataset.from_dict(
        {"input_ids": [[1] * 8, [1] * 20], "labels": [[1] * 5, [1] * 9], "id": ["a", "b"]}
    )
    args = Seq2SeqTrainingArguments(
        output_dir="out", per_device_train_batch_size=2, predict_with_generate=True, report_to="none"
    )
    return Seq2SeqTrainer(T5ForConditionalGeneration(config), args, train_dataset=rows, data_collator=collate)
