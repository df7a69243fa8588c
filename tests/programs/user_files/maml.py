"""Second-order MAML on few-shot tasks, by functional calls with fast weights."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

device = "cuda"


def conv_block(n_in, n_out):
    return nn.Sequential(
        nn.Conv2d(n_in, n_out, 3, padding=1),
        nn.BatchNorm2d(n_out, track_running_stats=False),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


net = nn.Sequential(
    conv_block(3, 64),
    conv_block(64, 64),
    conv_block(64, 64),
    conv_block(64, 64),
    nn.Flatten(),
    nn.Linear(64 * 25, 5),
).to(device)
meta_optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
inner_lr, inner_steps, shots = 0.01, 5, 5


def meta_step(images, labels):
    """Adapt to each task on its first images, and judge by the others."""
    images, labels = images.to(device), labels.to(device)
    meta_optimizer.zero_grad()
    total, correct = 0.0, 0
    for x, y in zip(images, labels, strict=True):
        support_x, query_x = x[: 5 * shots], x[5 * shots :]
        support_y, query_y = y[: 5 * shots], y[5 * shots :]
        fast = dict(net.named_parameters())
        for _ in range(inner_steps):
            loss = F.cross_entropy(functional_call(net, fast, (support_x,)), support_y)
            grads = torch.autograd.grad(loss, tuple(fast.values()), create_graph=True)
            fast = {name: p - inner_lr * g for (name, p), g in zip(fast.items(), grads, strict=True)}
        logits = functional_call(net, fast, (query_x,))
        query_loss = F.cross_entropy(logits, query_y) / len(images)
        query_loss.backward()
        total += query_loss.item()
        correct += (logits.argmax(1) == query_y).sum().item()
    meta_optimizer.step()
    return total, correct


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=4, help="tasks in a step")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    for step in range(args.steps):
        print(
            step,
            meta_step(torch.rand(args.batch_size, 50, 3, 80, 80), torch.randint(5, (args.batch_size, 50))),
        )
