"""Multiple choice with a collator of one's own, which flattens the choices and folds them again."""

from dataclasses import dataclass

import torch
from datasets import Dataset
from transformers import BertConfig, BertForMultipleChoice, Trainer, TrainingArguments


@dataclass
class DataCollatorForMultipleChoice:
    choices: int

    def __call__(self, features):
        labels = [feature.pop("label") for feature in features]
        flat = [choice for feature in features for choice in feature["input_ids"]]
        longest = max(map(len, flat))
        ids = torch.tensor([one + [0] * (longest - len(one)) for one in flat])
        batch = {"input_ids": ids.view(len(features), self.choices, -1)}
        return {**batch, "labels": torch.tensor(labels, dtype=torch.int64)}


def make_trainer():
    config = BertConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=100
    )
    rows = Dataset.from_dict({"input_ids": [[[1] * 7, [1] * 12, [1] * 5, [1] * 8]] * 6, "label": [2] * 6})
    args = TrainingArguments("out", per_device_train_batch_size=2, weight_decay=0.01, report_to="none")
    return Trainer(
        BertForMultipleChoice(config),
        args,
        train_dataset=rows,
        data_collator=DataCollatorForMultipleChoice(4),
    )
