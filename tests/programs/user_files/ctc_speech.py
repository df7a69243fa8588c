"""Speech recognition with a bidirectional GRU and the CTC loss."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn, optim


class SpeechModel(nn.Module):
    def __init__(self, n_feats=80, rnn_dim=320, n_layers=3, n_class=29, dropout=0.1):
        super().__init__()
        self.cnn = nn.Sequential(
            nn.Conv2d(1, 32, 3, stride=2, padding=1),
            nn.BatchNorm2d(32),
            nn.GELU(),
            nn.Conv2d(32, 32, 3, stride=(2, 1), padding=1),
            nn.GELU(),
        )
        self.fully_connected = nn.Linear(32 * (n_feats // 4), rnn_dim)
        self.rnn = nn.GRU(rnn_dim, rnn_dim, n_layers, batch_first=True, bidirectional=True, dropout=dropout)
        self.classifier = nn.Sequential(
            nn.Linear(rnn_dim * 2, rnn_dim), nn.GELU(), nn.Dropout(dropout), nn.Linear(rnn_dim, n_class)
        )

    def forward(self, x):
        x = self.cnn(x.unsqueeze(1))
        x = x.flatten(1, 2).transpose(1, 2)
        x, _ = self.rnn(self.fully_connected(x))
        return self.classifier(x)


class Recogniser:
    def __init__(self, learning_rate=5e-4, total_steps=1000):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = SpeechModel().to(self.device)
        self.optimizer = optim.AdamW(self.model.parameters(), learning_rate)
        self.criterion = nn.CTCLoss(blank=28, zero_infinity=True).to(self.device)
        self.scheduler = optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=learning_rate, total_steps=total_steps
        )

    def step(self, batch):
        spectrograms, labels = batch
        spectrograms, labels = spectrograms.to(self.device), labels.to(self.device)
        self.optimizer.zero_grad()
        output = F.log_softmax(self.model(spectrograms), dim=2).transpose(0, 1)
        input_lengths = torch.full((len(spectrograms),), output.shape[0], dtype=torch.long)
        label_lengths = torch.full((len(labels),), labels.shape[1], dtype=torch.long)
        loss = self.criterion(output, labels, input_lengths, label_lengths)
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    recogniser = Recogniser()
    for _ in range(args.steps):
        print(
            recogniser.step([torch.randn(args.batch_size, 80, 800), torch.randint(28, (args.batch_size, 60))])
        )
