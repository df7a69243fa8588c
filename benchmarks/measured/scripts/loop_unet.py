"""Train a U-Net by hand in channels_last and bfloat16 with an average of its weights, with expandable segments."""

import os

os.environ["PYTORCH_ALLOC_CONF"] = os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"

import torch
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def block(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.GroupNorm(8, outputs),
        nn.SiLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.GroupNorm(8, outputs),
        nn.SiLU(),
    )


class UNet(nn.Module):
    def __init__(self, width=64, depth=4):
        super().__init__()
        widths = [width << level for level in range(depth)]
        self.down = nn.ModuleList(block(i, o) for i, o in zip([3, *widths], widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(i, o, 2, 2) for i, o in zip(widths[:0:-1], widths[-2::-1]))
        self.merge = nn.ModuleList(block(2 * o, o) for o in widths[-2::-1])
        self.last = nn.Conv2d(width, 2, 1)

    def forward(self, x):
        kept = []
        for down in self.down:
            x = down(functional.max_pool2d(x, 2) if kept else x)
            kept.append(x)
        kept.pop()
        for up, merge in zip(self.up, self.merge):
            x = merge(torch.cat([up(x), kept.pop()], 1))
        return self.last(x)


torch.manual_seed(0)
model = UNet().cuda().to(memory_format=torch.channels_last)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for _ in range(4):
    images = torch.randn(8, 3, 256, 256).cuda().to(memory_format=torch.channels_last)
    masks = torch.randint(0, 2, (8, 256, 256)).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        loss = functional.cross_entropy(model(images), masks)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    average.update_parameters(model)
with torch.no_grad():
    average(torch.randn(16, 3, 256, 256).cuda())
