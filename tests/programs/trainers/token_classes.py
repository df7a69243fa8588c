"""Named entities: a class for each token, the library's own collator, and metrics after each epoch."""

import numpy as np
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForTokenClassification,
    DataCollatorForTokenClassification,
    EarlyStoppingCallback,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)


def compute_metrics(prediction):
    classes = np.argmax(prediction.predictions, axis=-1)
    return {"accuracy": float((classes == prediction.label_ids).mean())}


def make_trainer():
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<unk>": 1, "a": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", unk_token="<unk>")

    def tokenize(rows):
        encoded = tokenizer(rows["words"], is_split_into_words=True, truncation=True)
        encoded["labels"] = [list(range(len(ids))) for ids in encoded["input_ids"]]
        return encoded

    rows = Dataset.from_dict({"words": [["a"] * 6, ["a"] * 9, ["a"] * 3] * 4})
    data = rows.map(tokenize, batched=True, remove_columns=["words"]).train_test_split(test_size=4, seed=0)
    config = BertConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=100,
        num_labels=9,
    )  # fmt: skip
    args = TrainingArguments(
        "out", per_device_train_batch_size=4, eval_strategy="epoch", save_strategy="epoch",
        load_best_model_at_end=True, metric_for_best_model="accuracy", report_to="none",
    )  # fmt: skip
    return Trainer(
        BertForTokenClassification(config), args, train_dataset=data["train"], eval_dataset=data["test"],
        data_collator=DataCollatorForTokenClassification(tokenizer), processing_class=tokenizer,
        compute_metrics=compute_metrics, callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
    )  # fmt: skip
