"""Classification on a dataset of torch whose labels are 0-d tensors, as transformers' own tutorial has it."""

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


class Rows(Dataset):
    """Encodings of a tokenizer and a label each."""

    def __init__(self, encodings, labels):
        self.encodings = encodings
        self.labels = labels

    def __getitem__(self, idx):
        item = {key: torch.tensor(val[idx]) for key, val in self.encodings.items()}
        item["labels"] = torch.tensor(self.labels[idx])
        return item

    def __len__(self):
        return len(self.labels)


def make_trainer():
    encodings = {"input_ids": [[1] * 24] * 32, "attention_mask": [[1] * 24] * 32}
    config = BertConfig(
        hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=100
    )
    args = TrainingArguments(
        "out", per_device_train_batch_size=4, num_train_epochs=1, use_cpu=True, report_to="none"
    )
    model = BertForSequenceClassification(config)
    return Trainer(model=model, args=args, train_dataset=Rows(encodings, [0, 1] * 16))


if __name__ == "__main__":
    make_trainer().train()
