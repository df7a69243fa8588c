"""Question answering: the first and the last token of an answer, features padded by the tokenizer."""

from datasets import Dataset
from transformers import (
    DistilBertConfig,
    DistilBertForQuestionAnswering,
    Trainer,
    TrainingArguments,
    default_data_collator,
)


def make_trainer():
    config = DistilBertConfig(dim=64, hidden_dim=64, n_layers=1, n_heads=2, vocab_size=100)
    rows = Dataset.from_dict(
        {
            "input_ids": [[1] * 48] * 8,
            "attention_mask": [[1] * 48] * 8,
            "start_positions": [3] * 8,
            "end_positions": [5] * 8,
            "example_id": ["q"] * 8,
        }
    )
    args = TrainingArguments(
        "out", per_device_train_batch_size=4, learning_rate=3e-5, fp16=True, warmup_steps=10, report_to="none"
    )
    return Trainer(
        model=DistilBertForQuestionAnswering(config), args=args, train_dataset=rows, eval_dataset=rows,
        data_collator=default_data_collator,
    )  # fmt: skip
