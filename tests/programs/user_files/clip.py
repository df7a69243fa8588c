"""Contrastive training of an image and a text encoder with a learned temperature."""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models import resnet50


class TextEncoder(nn.Module):
    def __init__(self, vocab=49408, width=256, heads=4, layers=6, context=77, out=512):
        super().__init__()
        self.token_embedding = nn.Embedding(vocab, width)
        self.positional_embedding = nn.Parameter(torch.randn(context, width) * 0.01)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True
        )
        self.transformer = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.ln_final = nn.LayerNorm(width)
        self.text_projection = nn.Parameter(torch.randn(width, out) * width**-0.5)
        self.register_buffer("mask", torch.full((context, context), float("-inf")).triu_(1), persistent=False)

    def forward(self, text):
        x = self.token_embedding(text) + self.positional_embedding
        x = self.ln_final(self.transformer(x, mask=self.mask))
        return x[torch.arange(x.shape[0], device=x.device), text.argmax(dim=-1)] @ self.text_projection


class CLIP(nn.Module):
    def __init__(self, embed_dim=512):
        super().__init__()
        self.visual, self.text = resnet50(num_classes=embed_dim), TextEncoder(out=embed_dim)
        self.logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))

    def forward(self, image, text):
        image_features, text_features = (
            F.normalize(self.visual(image), dim=-1),
            F.normalize(self.text(text), dim=-1),
        )
        return image_features, text_features, self.logit_scale.exp()


def make_trainer():
    model = CLIP().cuda()
    exclude = lambda n, p: p.ndim < 2 or "bn" in n or "ln" in n or "bias" in n or "logit_scale" in n
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in named if exclude(n, p)], "weight_decay": 0.0},
            {"params": [p for n, p in named if not exclude(n, p)], "weight_decay": 0.2},
        ],
        lr=5e-4,
        betas=(0.9, 0.98),
    )
    scaler = torch.amp.GradScaler()

    def train_one_batch(images, texts):
        images = images.to(device="cuda", non_blocking=True)
        texts = texts.to(device="cuda", non_blocking=True)
        optimizer.zero_grad()
        with torch.amp.autocast("cuda"):
            image_features, text_features, logit_scale = model(images, texts)
            logits_per_image = logit_scale * image_features @ text_features.T
            labels = torch.arange(len(images), device="cuda", dtype=torch.long)
            loss = (
                F.cross_entropy(logits_per_image, labels) + F.cross_entropy(logits_per_image.T, labels)
            ) / 2
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        with torch.no_grad():
            model.logit_scale.clamp_(0, math.log(100))
        return loss.item()

    return train_one_batch


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    train_one_batch = make_trainer()
    for i in range(args.steps):
        print(
            i,
            train_one_batch(
                torch.rand(args.batch_size, 3, 128, 128), torch.randint(49408, (args.batch_size, 77))
            ),
        )
