"""Fine-tune a model of timm: half of its blocks frozen, rates by layer, mixup, smoothing and an average."""

import argparse

import timm
import torch
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.utils import ModelEmaV3
from torch.utils.data import DataLoader, TensorDataset

CLASSES = 37


class FineTuning:
    def __init__(self, name="vit_small_patch16_224", pretrained=False):
        self.device = torch.device("cuda")
        self.model = timm.create_model(name, pretrained=pretrained, num_classes=CLASSES, drop_path_rate=0.1)
        for part in (self.model.patch_embed, *self.model.blocks[:6]):
            part.requires_grad_(False)
        self.model.to(self.device)
        self.ema = ModelEmaV3(self.model, decay=0.999)
        self.optimizer = torch.optim.AdamW(self.groups(5e-4, 0.75), weight_decay=0.05)
        self.mixup = Mixup(mixup_alpha=0.8, label_smoothing=0.1, num_classes=CLASSES)
        self.criterion = SoftTargetCrossEntropy()

    def groups(self, rate, decay):
        blocks = len(self.model.blocks)
        rates = {f"blocks.{n}.": rate * decay ** (blocks - n) for n in range(blocks)}
        for prefix, value in rates.items():
            kept = [p for n, p in self.model.named_parameters() if n.startswith(prefix) and p.requires_grad]
            if kept:
                yield {"params": kept, "lr": value}
        rest = [p for n, p in self.model.named_parameters() if not n.startswith("blocks") and p.requires_grad]
        yield {"params": rest, "lr": rate}

    def step(self, batch):
        images, labels = (one.to(self.device, non_blocking=True) for one in batch)
        images, labels = self.mixup(images, labels)
        self.model.train()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = self.criterion(self.model(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.requires_grad], 1.0)
        self.optimizer.step()
        self.ema.update(self.model)
        return loss.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    count = args.batch_size * args.steps
    data = TensorDataset(torch.rand(count, 3, 224, 224), torch.randint(CLASSES, (count,)))
    training = FineTuning()
    for batch in DataLoader(data, batch_size=args.batch_size):
        print(training.step(batch))
