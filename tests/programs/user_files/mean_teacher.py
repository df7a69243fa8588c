"""Mean teacher: labelled and unlabelled images, a teacher that is the EMA of the student."""

import argparse
from itertools import cycle

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import wide_resnet50_2


def create_model(ema=False):
    model = wide_resnet50_2(num_classes=10).cuda()
    if ema:
        for param in model.parameters():
            param.detach_()
    return model


def update_ema_variables(model, ema_model, alpha, global_step):
    alpha = min(1 - 1 / (global_step + 1), alpha)
    for ema_param, param in zip(ema_model.parameters(), model.parameters(), strict=True):
        ema_param.data.mul_(alpha).add_(param.data, alpha=1 - alpha)


def softmax_mse_loss(input_logits, target_logits):
    num_classes = input_logits.size()[1]
    return (
        F.mse_loss(F.softmax(input_logits, dim=1), F.softmax(target_logits, dim=1), reduction="sum")
        / num_classes
    )


class MeanTeacher:
    def __init__(self, lr=0.05, consistency=100.0, ema_decay=0.999):
        self.model, self.ema_model = create_model(), create_model(ema=True)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr, momentum=0.9, weight_decay=1e-4, nesterov=True
        )
        self.class_criterion = nn.CrossEntropyLoss(reduction="sum").cuda()
        self.consistency, self.ema_decay, self.global_step = consistency, ema_decay, 0

    def step(self, images, labels, unlabeled):
        images, labels, unlabeled = images.cuda(), labels.cuda(), unlabeled.cuda()
        both = torch.cat([images, unlabeled])
        ema_input = both + torch.randn_like(both) * 0.1
        minibatch_size = len(both)
        with torch.no_grad():
            ema_logit = self.ema_model(ema_input)
        model_out = self.model(both)
        class_loss = self.class_criterion(model_out[: len(images)], labels) / minibatch_size
        consistency_weight = self.consistency * min(1.0, (self.global_step + 1) / 1000)
        consistency_loss = consistency_weight * softmax_mse_loss(model_out, ema_logit) / minibatch_size
        loss = class_loss + consistency_loss
        assert not (loss.item() > 1e5), f"Loss explosion: {loss.item()}"
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.global_step += 1
        update_ema_variables(self.model, self.ema_model, self.ema_decay, self.global_step)
        return {"class_loss": class_loss.item(), "cons_loss": consistency_loss.item()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    n = args.batch_size * args.steps
    labeled = TensorDataset(torch.rand(args.batch_size, 3, 64, 64), torch.randint(10, (args.batch_size,)))
    unlabeled = TensorDataset(torch.rand(n, 3, 64, 64))
    teaching = MeanTeacher()
    loaders = (cycle(DataLoader(labeled, args.batch_size)), DataLoader(unlabeled, args.batch_size))
    for (x, y), (u,) in zip(*loaders, strict=False):
        print(teaching.step(x, y, u))
