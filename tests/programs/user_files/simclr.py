"""SimCLR: two views of each image, NT-Xent loss over all pairs of the batch."""

import argparse

import torch
import torch.nn.functional as F
import torchvision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class ResNetSimCLR(nn.Module):
    def __init__(self, out_dim=128):
        super().__init__()
        self.backbone = torchvision.models.resnet18(weights=None, num_classes=out_dim)
        dim_mlp = self.backbone.fc.in_features
        self.backbone.fc = nn.Sequential(nn.Linear(dim_mlp, dim_mlp), nn.ReLU(), self.backbone.fc)

    def forward(self, x):
        return self.backbone(x)


class SimCLR:
    def __init__(self, temperature=0.07, lr=3e-4, n_views=2):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.temperature, self.n_views = temperature, n_views
        self.model = ResNetSimCLR().to(self.device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr, weight_decay=1e-4)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=1000)
        self.criterion = nn.CrossEntropyLoss().to(self.device)

    def info_nce_loss(self, features):
        n = features.shape[0] // self.n_views
        labels = torch.cat([torch.arange(n) for _ in range(self.n_views)], dim=0)
        labels = (labels.unsqueeze(0) == labels.unsqueeze(1)).float().to(self.device)
        features = F.normalize(features, dim=1)
        similarity_matrix = torch.matmul(features, features.T)

        # without the main diagonal
        mask = torch.eye(2 * n, dtype=torch.bool, device=self.device)
        labels = labels.masked_fill(mask, 0.0)
        similarity_matrix = similarity_matrix.masked_fill(mask, -1e4)
        positives = (similarity_matrix * labels).sum(dim=1, keepdim=True)
        negatives = similarity_matrix.masked_fill(labels.bool(), -1e4)
        logits = torch.cat([positives, negatives], dim=1) / self.temperature
        targets = torch.zeros(logits.shape[0], dtype=torch.long).to(self.device)
        return logits, targets

    def step(self, images):
        images = torch.cat(images, dim=0).to(self.device)
        features = self.model(images)
        logits, labels = self.info_nce_loss(features)
        loss = self.criterion(logits, labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        top1 = (logits.argmax(dim=1) == labels).float().mean()
        return loss.item(), top1.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    images = torch.rand(args.batch_size * args.steps, 3, 96, 96)
    loader = DataLoader(TensorDataset(images, images.flip(-1)), batch_size=args.batch_size, drop_last=True)
    simclr = SimCLR()
    for views in loader:
        print("loss %.4f top1 %.3f" % simclr.step(views))
