"""A model of one's own on a TensorDataset: the collator of torch gives pairs, the loss is the trainer's."""

import torch
from torch import nn
from torch.utils.data import TensorDataset, default_collate
from transformers import Trainer, TrainingArguments


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3))

    def forward(self, x):
        return self.layers(x)


class PairTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        x, y = inputs
        output = model(x)
        loss = nn.functional.cross_entropy(output, y)
        return (loss, output) if return_outputs else loss


def make_trainer():
    data = TensorDataset(torch.randn(64, 20), torch.randint(0, 3, (64,)))
    args = TrainingArguments(
        "out", remove_unused_columns=False, per_device_train_batch_size=16, report_to="none"
    )
    return PairTrainer(Net(), args, train_dataset=data, data_collator=default_collate)
