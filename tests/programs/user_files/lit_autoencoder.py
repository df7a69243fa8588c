"""A Lightning module with two optimizers by hand: an autoencoder and the classifier on its codes."""

import argparse

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class LitAutoencoder(L.LightningModule):
    def __init__(self, width=64):
        super().__init__()
        self.automatic_optimization = False
        self.encoder = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1), nn.GELU(), nn.Conv2d(width, 2 * width, 4, 2, 1), nn.GELU()
        )
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1), nn.GELU(), nn.ConvTranspose2d(width, 3, 4, 2, 1)
        )
        self.classifier = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 256), nn.ReLU(), nn.Linear(256, 10)
        )

    def training_step(self, batch, batch_idx):
        images, labels = batch
        for_codes, for_classes = self.optimizers()

        self.toggle_optimizer(for_codes)
        codes = self.encoder(images)
        loss = F.mse_loss(self.decoder(codes), images)
        for_codes.zero_grad()
        self.manual_backward(loss)
        self.clip_gradients(for_codes, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        for_codes.step()
        self.untoggle_optimizer(for_codes)

        self.toggle_optimizer(for_classes)
        error = F.cross_entropy(self.classifier(codes.detach()), labels)
        for_classes.zero_grad()
        self.manual_backward(error)
        for_classes.step()
        self.untoggle_optimizer(for_classes)
        self.log_dict({"reconstruction": loss, "classes": error}, prog_bar=False)

    def configure_optimizers(self):
        codes = [*self.encoder.parameters(), *self.decoder.parameters()]
        return [
            torch.optim.AdamW(codes, lr=1e-3),
            torch.optim.SGD(self.classifier.parameters(), lr=0.1, momentum=0.9, nesterov=True),
        ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    count = args.batch_size * args.steps
    data = TensorDataset(torch.rand(count, 3, 64, 64), torch.randint(10, (count,)))
    trainer = L.Trainer(
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LitAutoencoder(), DataLoader(data, batch_size=args.batch_size))
