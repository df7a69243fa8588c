"""Language modelling from a file of tokens: a dataset that yields tensors, and a collator that names them."""

import torch
from torch.utils.data import IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Tokens(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        while True:
            yield torch.randint(0, 200, (self.length,))


def collate(rows):
    ids = torch.stack(rows)
    return {"input_ids": ids, "labels": ids.clone()}


def make_trainer():
    args = TrainingArguments("out", max_steps=100, optim="adafactor", report_to="none")
    model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=200))
    return Trainer(model, args, train_dataset=Tokens(32), data_collator=collate)
