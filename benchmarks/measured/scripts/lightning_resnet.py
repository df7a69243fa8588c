"""Train a ResNet with Lightning in mixed float16, with validation and a checkpoint after the epoch."""

from tempfile import mkdtemp

import lightning as L
import torch
import torchvision
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torchvision.models.resnet34(num_classes=100)

    def training_step(self, batch, index):
        loss = functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


torch.manual_seed(0)
data = TensorDataset(torch.randn(128, 3, 224, 224), torch.randint(0, 100, (128,)))
trainer = L.Trainer(
    max_epochs=2,
    limit_train_batches=3,
    limit_val_batches=2,
    precision="16-mixed",
    gradient_clip_val=1.0,
    default_root_dir=mkdtemp(),
    logger=False,
    enable_progress_bar=False,
)
trainer.fit(Classifier(), DataLoader(data, batch_size=32), DataLoader(data, batch_size=64))
