"""A U-Net for masks: fp16 autocast with a GradScaler, channels_last."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class DoubleConv(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.double_conv = nn.Sequential(
            nn.Conv2d(n_in, n_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(n_out),
            nn.ReLU(inplace=True),
            nn.Conv2d(n_out, n_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(n_out),
            nn.ReLU(inplace=True),
        )

    def forward(self, x):
        return self.double_conv(x)


class Up(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.up = nn.ConvTranspose2d(n_in, n_in // 2, kernel_size=2, stride=2)
        self.conv = DoubleConv(n_in, n_out)

    def forward(self, x1, x2):
        x1 = self.up(x1)
        dy, dx = x2.size(2) - x1.size(2), x2.size(3) - x1.size(3)
        x1 = F.pad(x1, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
        return self.conv(torch.cat([x2, x1], dim=1))


class UNet(nn.Module):
    def __init__(self, n_channels=3, n_classes=4, width=32):
        super().__init__()
        widths = [width * 2**i for i in range(5)]
        self.inc = DoubleConv(n_channels, width)
        self.down = nn.ModuleList(DoubleConv(a, b) for a, b in zip(widths, widths[1:], strict=False))
        self.up = nn.ModuleList(Up(b, a) for a, b in reversed([*zip(widths, widths[1:], strict=False)]))
        self.outc = nn.Conv2d(width, n_classes, 1)

    def forward(self, x):
        skips = [self.inc(x)]
        for down in self.down:
            skips.append(down(F.max_pool2d(skips[-1], 2)))
        x = skips.pop()
        for up in self.up:
            x = up(x, skips.pop())
        return self.outc(x)


def dice_loss(pred, target, eps=1e-6):
    dims = (-1, -2, 0)
    inter = 2 * (pred * target).sum(dim=dims)
    total = pred.sum(dim=dims) + target.sum(dim=dims)
    return 1 - ((inter + eps) / (total + eps)).mean()


class Training:
    def __init__(self, n_classes=4, lr=1e-5, amp=True):
        self.device, self.amp, self.n_classes = torch.device("cuda"), amp, n_classes
        self.model = UNet(n_classes=n_classes).to(memory_format=torch.channels_last)
        self.model.to(device=self.device)
        self.optimizer = torch.optim.RMSprop(
            self.model.parameters(), lr=lr, weight_decay=1e-8, momentum=0.999, foreach=True
        )
        self.grad_scaler = torch.amp.GradScaler("cuda", enabled=amp)
        self.criterion = nn.CrossEntropyLoss()
        self.global_step, self.epoch_loss = 0, 0

    def step(self, batch):
        images, true_masks = batch["image"], batch["mask"]
        images = images.to(device=self.device, dtype=torch.float32, memory_format=torch.channels_last)
        true_masks = true_masks.to(device=self.device, dtype=torch.long)
        with torch.autocast(self.device.type, enabled=self.amp):
            masks_pred = self.model(images)
            loss = self.criterion(masks_pred, true_masks)
            loss += dice_loss(
                F.softmax(masks_pred, dim=1).float(),
                F.one_hot(true_masks, self.n_classes).permute(0, 3, 1, 2).float(),
            )
        self.optimizer.zero_grad(set_to_none=True)
        self.grad_scaler.scale(loss).backward()
        self.grad_scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.grad_scaler.step(self.optimizer)
        self.grad_scaler.update()
        self.global_step += 1
        self.epoch_loss += loss.item()


class Masks(TensorDataset):
    def __getitem__(self, i):
        image, mask = super().__getitem__(i)
        return {"image": image, "mask": mask}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    n = args.batch_size * args.steps
    data = Masks(torch.rand(n, 3, 192, 192), torch.randint(4, (n, 192, 192)))
    training = Training()
    for batch in DataLoader(data, batch_size=args.batch_size, shuffle=True, pin_memory=True):
        training.step(batch)
    print(training.epoch_loss / training.global_step)
