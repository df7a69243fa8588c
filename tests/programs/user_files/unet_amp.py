"""A U-Net for segmentation in mixed precision, with a gradient scaler, Dice loss and clipping."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class DoubleConv(nn.Sequential):
    def __init__(self, inputs, outputs):
        super().__init__(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    def __init__(self, channels=3, classes=2, widths=(32, 64, 128, 256)):
        super().__init__()
        self.down = nn.ModuleList(DoubleConv(a, b) for a, b in zip((channels, *widths), widths, strict=False))
        self.middle = DoubleConv(widths[-1], 2 * widths[-1])
        back = widths[::-1]
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in back)
        self.join = nn.ModuleList(DoubleConv(2 * w, w) for w in back)
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x):
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for up, join, skip in zip(self.up, self.join, reversed(kept), strict=True):
            x = join(torch.cat([skip, up(x)], dim=1))
        return self.head(x)


def dice_loss(probs, target, epsilon=1e-6):
    inter = 2 * (probs * target).sum(dim=(-1, -2))
    sets = probs.sum(dim=(-1, -2)) + target.sum(dim=(-1, -2))
    return 1 - ((inter + epsilon) / (sets + epsilon)).mean()


class Training:
    def __init__(self, amp=True):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = UNet().to(self.device, memory_format=torch.channels_last)
        self.optimizer = torch.optim.RMSprop(
            self.model.parameters(), lr=1e-5, weight_decay=1e-8, momentum=0.999, foreach=True
        )
        self.scaler = torch.amp.GradScaler("cuda", enabled=amp)
        self.criterion = nn.CrossEntropyLoss()
        self.amp = amp

    def step(self, batch):
        images, masks = batch["image"], batch["mask"]
        images = images.to(self.device, dtype=torch.float32, memory_format=torch.channels_last)
        masks = masks.to(self.device, dtype=torch.long)
        with torch.autocast(self.device.type, enabled=self.amp, dtype=torch.float16):
            pred = self.model(images)
            loss = self.criterion(pred, masks)
            onehot = F.one_hot(masks, 2).permute(0, 3, 1, 2).float()
            loss += dice_loss(F.softmax(pred, dim=1).float(), onehot)
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()


class Pairs(TensorDataset):
    def __getitem__(self, index):
        image, mask = super().__getitem__(index)
        return {"image": image, "mask": mask}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    count = args.batch_size * args.steps
    data = Pairs(torch.rand(count, 3, 160, 160), torch.zeros(count, 160, 160, dtype=torch.int64))
    training = Training()
    for batch in DataLoader(data, batch_size=args.batch_size):
        print(training.step(batch))
