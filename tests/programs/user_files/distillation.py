"""Distil a ResNet-50 into a ResNet-18."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision import models


def make_distiller(temperature=4.0, alpha=0.9, lr=0.05):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    teacher = models.resnet50(num_classes=100).to(device).eval()
    student = models.resnet18(num_classes=100).to(device)
    for p in teacher.parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4, nesterov=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=lr, total_steps=1000)
    kl = nn.KLDivLoss(reduction="batchmean", log_target=True)

    def train_step(images, labels):
        images, labels = images.to(device), labels.to(device)
        student.train()
        with torch.no_grad():
            teacher_logits = teacher(images)
        student_logits = student(images)
        soft = kl(
            F.log_softmax(student_logits / temperature, dim=1),
            F.log_softmax(teacher_logits / temperature, dim=1),
        )
        hard = F.cross_entropy(student_logits, labels, label_smoothing=0.1)
        loss = alpha * temperature**2 * soft + (1 - alpha) * hard
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        scheduler.step()
        accuracy = (student_logits.argmax(1) == labels).float().mean()
        return {"loss": loss.item(), "accuracy": accuracy.item()}

    return train_step


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    n = args.batch_size * args.steps
    data = TensorDataset(torch.rand(n, 3, 128, 128), torch.randint(100, (n,)))
    train_step = make_distiller()
    for images, labels in DataLoader(data, batch_size=args.batch_size, shuffle=True):
        print(train_step(images, labels))
