"""Sharpness-aware minimization: an optimizer of its own and two passes in each step."""

import argparse

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import densenet121


class SAM(torch.optim.Optimizer):
    def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        grad_norm = self._grad_norm()
        for group in self.param_groups:
            scale = group["rho"] / (grad_norm + 1e-12)
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * scale.to(p))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()

    def _grad_norm(self):
        shared = self.param_groups[0]["params"][0].device
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        return torch.norm(torch.stack([g.norm(p=2).to(shared) for g in grads]), p=2)


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = densenet121(num_classes=10).to(device)
optimizer = SAM(model.parameters(), torch.optim.SGD, rho=0.05, lr=0.1, momentum=0.9, weight_decay=5e-4)


def train_step(batch):
    inputs, targets = (b.to(device) for b in batch)
    predictions = model(inputs)
    loss = F.cross_entropy(predictions, targets, label_smoothing=0.1)
    loss.mean().backward()
    optimizer.first_step(zero_grad=True)
    F.cross_entropy(model(inputs), targets, label_smoothing=0.1).mean().backward()
    optimizer.second_step(zero_grad=True)
    with torch.no_grad():
        correct = torch.argmax(predictions.data, 1) == targets
        return loss.cpu(), correct.cpu()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    n = args.batch_size * args.steps
    data = TensorDataset(torch.rand(n, 3, 64, 64), torch.randint(10, (n,)))
    for batch in DataLoader(data, batch_size=args.batch_size, shuffle=True):
        loss, correct = train_step(batch)
        print(loss.item(), correct.float().mean().item())
