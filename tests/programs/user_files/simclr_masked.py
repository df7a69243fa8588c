"""SimCLR whose NT-Xent loss drops the diagonal by indexing with boolean masks."""

import argparse

import torch
import torch.nn.functional as F
import torchvision
from torch import nn

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = torchvision.models.resnet18(num_classes=128)
model.fc = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), model.fc)
model = model.to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=1e-4)
criterion = nn.CrossEntropyLoss()


def info_nce_loss(features, temperature=0.5):
    n = features.shape[0] // 2
    labels = torch.cat([torch.arange(n) for i in range(2)], dim=0)
    labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).float()
    labels = labels.to(device)
    features = F.normalize(features, dim=1)
    similarity_matrix = torch.matmul(features, features.T)

    # discard the main diagonal from both
    mask = ~torch.eye(labels.shape[0], dtype=torch.bool)
    labels = labels[mask].view(labels.shape[0], -1)
    similarity_matrix = similarity_matrix[mask].view(similarity_matrix.shape[0], -1)
    logits = similarity_matrix / temperature
    log_prob = logits - torch.logsumexp(logits, dim=1, keepdim=True)
    return -(labels * log_prob).sum(1).mean()


def train_step(view1, view2):
    view1, view2 = view1.to(device, non_blocking=True), view2.to(device, non_blocking=True)
    features = model(torch.cat([view1, view2]))
    loss = info_nce_loss(features)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    for _ in range(args.steps):
        images = torch.rand(args.batch_size, 3, 64, 64)
        print(train_step(images, images.flip(-1)))
