"""Distil a BERT into a smaller one by logits and hidden states, with a projection between widths."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification


def bert(layers, width):
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=8000,
            num_hidden_layers=layers,
            hidden_size=width,
            intermediate_size=4 * width,
            num_attention_heads=width // 64,
            num_labels=3,
        )
    )


class Distiller(nn.Module):
    def __init__(self, temperature=2.0):
        super().__init__()
        self.teacher = bert(8, 512).eval().requires_grad_(False)
        self.student = bert(4, 256)
        self.project = nn.ModuleList(nn.Linear(256, 512) for _ in range(5))
        self.temperature = temperature

    def forward(self, input_ids, labels):
        with torch.no_grad():
            theirs = self.teacher(input_ids, output_hidden_states=True)
        ours = self.student(input_ids, output_hidden_states=True)
        t = self.temperature
        soft = F.kl_div(
            F.log_softmax(ours.logits / t, dim=-1),
            F.softmax(theirs.logits / t, dim=-1),
            reduction="batchmean",
        )
        hidden = sum(
            F.mse_loss(project(one), other)
            for project, one, other in zip(
                self.project, ours.hidden_states, theirs.hidden_states[::2], strict=True
            )
        )
        return F.cross_entropy(ours.logits, labels) + t * t * soft + hidden


class Training:
    def __init__(self):
        self.distiller = Distiller().to("cuda")
        trained = [one for one in self.distiller.parameters() if one.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)

    def step(self, input_ids, labels):
        self.distiller.student.train()
        loss = self.distiller(input_ids.to("cuda"), labels.to("cuda"))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    count = args.batch_size * args.steps
    data = TensorDataset(torch.randint(8000, (count, 128)), torch.randint(3, (count,)))
    training = Training()
    for ids, labels in DataLoader(data, batch_size=args.batch_size):
        loss = training.step(ids, labels)
    print(float(loss))
