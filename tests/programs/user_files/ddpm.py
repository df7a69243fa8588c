"""DDPM with a U-Net of its own and an EMA of its weights."""

import argparse
import copy
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class SinusoidalPosEmb(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, x):
        half = self.dim // 2
        emb = torch.exp(torch.arange(half, device=x.device) * -(math.log(10000) / (half - 1)))
        emb = x[:, None] * emb[None, :]
        return torch.cat((emb.sin(), emb.cos()), dim=-1)


class ResnetBlock(nn.Module):
    def __init__(self, dim, dim_out, time_dim, groups=8):
        super().__init__()
        self.mlp = nn.Sequential(nn.SiLU(), nn.Linear(time_dim, dim_out * 2))
        self.conv1, self.norm1 = nn.Conv2d(dim, dim_out, 3, padding=1), nn.GroupNorm(groups, dim_out)
        self.conv2, self.norm2 = nn.Conv2d(dim_out, dim_out, 3, padding=1), nn.GroupNorm(groups, dim_out)
        self.act = nn.SiLU()
        self.res_conv = nn.Conv2d(dim, dim_out, 1) if dim != dim_out else nn.Identity()

    def forward(self, x, time_emb):
        scale, shift = self.mlp(time_emb)[:, :, None, None].chunk(2, dim=1)
        h = self.norm1(self.conv1(x))
        h = self.act(h * (scale + 1) + shift)
        h = self.act(self.norm2(self.conv2(h)))
        return h + self.res_conv(x)


class LinearAttention(nn.Module):
    def __init__(self, dim, heads=4, dim_head=32):
        super().__init__()
        self.scale, self.heads = dim_head**-0.5, heads
        self.norm = nn.GroupNorm(1, dim)
        self.to_qkv = nn.Conv2d(dim, heads * dim_head * 3, 1, bias=False)
        self.to_out = nn.Sequential(nn.Conv2d(heads * dim_head, dim, 1), nn.GroupNorm(1, dim))

    def forward(self, x):
        b, c, h, w = x.shape
        q, k, v = (t.reshape(b, self.heads, -1, h * w) for t in self.to_qkv(self.norm(x)).chunk(3, dim=1))
        q, k = q.softmax(dim=-2) * self.scale, k.softmax(dim=-1)
        context = torch.einsum("b h d n, b h e n -> b h d e", k, v)
        out = torch.einsum("b h d e, b h d n -> b h e n", context, q)
        return self.to_out(out.reshape(b, -1, h, w)) + x


class Unet(nn.Module):
    def __init__(self, dim=64, dim_mults=(1, 2, 4), channels=3):
        super().__init__()
        self.init_conv = nn.Conv2d(channels, dim, 7, padding=3)
        dims = [dim, *[dim * m for m in dim_mults]]
        in_out = list(zip(dims[:-1], dims[1:], strict=True))
        time_dim = dim * 4
        self.time_mlp = nn.Sequential(
            SinusoidalPosEmb(dim), nn.Linear(dim, time_dim), nn.GELU(), nn.Linear(time_dim, time_dim)
        )
        self.downs, self.ups = nn.ModuleList(), nn.ModuleList()
        for i, (a, b) in enumerate(in_out):
            down = nn.Conv2d(a, b, 4, 2, 1) if i < len(in_out) - 1 else nn.Conv2d(a, b, 3, padding=1)
            self.downs.append(nn.ModuleList([ResnetBlock(a, a, time_dim), LinearAttention(a), down]))
        mid = dims[-1]
        self.mid_block1, self.mid_attn = ResnetBlock(mid, mid, time_dim), LinearAttention(mid)
        self.mid_block2 = ResnetBlock(mid, mid, time_dim)
        for i, (a, b) in enumerate(reversed(in_out)):
            last = i == len(in_out) - 1
            up = nn.Sequential(
                nn.Upsample(scale_factor=1 if last else 2, mode="nearest"), nn.Conv2d(b, a, 3, padding=1)
            )
            self.ups.append(nn.ModuleList([ResnetBlock(b + a, b, time_dim), LinearAttention(b), up]))
        self.final_res_block, self.final_conv = (
            ResnetBlock(dim * 2, dim, time_dim),
            nn.Conv2d(dim, channels, 1),
        )

    def forward(self, x, time):
        x = self.init_conv(x)
        r, t, h = x.clone(), self.time_mlp(time), []
        for block, attn, downsample in self.downs:
            x = attn(block(x, t))
            h.append(x)
            x = downsample(x)
        x = self.mid_block2(self.mid_attn(self.mid_block1(x, t)), t)
        for block, attn, upsample in self.ups:
            skip = h.pop()
            if x.shape[-1] != skip.shape[-1]:
                x = F.interpolate(x, size=skip.shape[-2:])
            x = upsample(attn(block(torch.cat((x, skip), dim=1), t)))
        if x.shape[-1] != r.shape[-1]:
            x = F.interpolate(x, size=r.shape[-2:])
        return self.final_conv(self.final_res_block(torch.cat((x, r), dim=1), t))


class GaussianDiffusion(nn.Module):
    def __init__(self, model, timesteps=1000):
        super().__init__()
        self.model, self.num_timesteps = model, timesteps
        betas = torch.linspace(1e-4, 0.02, timesteps, dtype=torch.float64)
        alphas_cumprod = torch.cumprod(1.0 - betas, dim=0)
        self.register_buffer("sqrt_alphas_cumprod", torch.sqrt(alphas_cumprod).float())
        self.register_buffer("sqrt_one_minus_alphas_cumprod", torch.sqrt(1.0 - alphas_cumprod).float())

    def extract(self, a, t, shape):
        return a.gather(-1, t).reshape(t.shape[0], *((1,) * (len(shape) - 1)))

    def forward(self, img):
        img = img * 2 - 1
        t = torch.randint(0, self.num_timesteps, (img.shape[0],), device=img.device).long()
        noise = torch.randn_like(img)
        x = self.extract(self.sqrt_alphas_cumprod, t, img.shape) * img
        x = x + self.extract(self.sqrt_one_minus_alphas_cumprod, t, img.shape) * noise
        return F.mse_loss(self.model(x, t), noise)


class EMA:
    def __init__(self, model, beta=0.995, update_every=10):
        self.beta, self.update_every, self.step = beta, update_every, 0
        self.ema_model = copy.deepcopy(model)
        self.ema_model.requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        self.step += 1
        if self.step % self.update_every:
            return
        for a, b in zip(self.ema_model.parameters(), model.parameters(), strict=True):
            a.lerp_(b, 1.0 - self.beta)


class DiffusionTrainer:
    def __init__(self, lr=8e-5, gradient_accumulate_every=2):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = GaussianDiffusion(Unet()).to(self.device)
        self.opt = torch.optim.Adam(self.model.parameters(), lr=lr, betas=(0.9, 0.99))
        self.ema = EMA(self.model)
        self.accumulate = gradient_accumulate_every

    def step(self, data):
        total_loss = 0.0
        for micro in data.chunk(self.accumulate):
            loss = self.model(micro.to(self.device)) / self.accumulate
            total_loss += loss.item()
            loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.opt.step()
        self.opt.zero_grad()
        self.ema.update(self.model)
        return total_loss


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    images = torch.rand(args.batch_size * args.steps, 3, 64, 64)
    trainer = DiffusionTrainer()
    for (batch,) in DataLoader(TensorDataset(images), batch_size=args.batch_size, shuffle=True):
        print(f"loss: {trainer.step(batch):.4f}")
