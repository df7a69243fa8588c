"""A small NeRF: coarse and fine networks, samples along the rays by the weights of the coarse one."""

import argparse

import torch
from torch import nn


def posenc(x, num_freqs):
    freqs = 2.0 ** torch.arange(num_freqs, device=x.device)
    angles = (x[..., None, :] * freqs[:, None]).flatten(-2)
    return torch.cat([x, torch.sin(angles), torch.cos(angles)], dim=-1)


class NeRF(nn.Module):
    def __init__(self, D=8, W=128, n_in=63, n_views=27, skip=4):
        super().__init__()
        self.skip = skip
        self.pts_linears = nn.ModuleList(
            [nn.Linear(n_in, W)] + [nn.Linear(W + n_in if i == skip else W, W) for i in range(D - 1)]
        )
        self.feature_linear, self.alpha_linear = nn.Linear(W, W), nn.Linear(W, 1)
        self.views_linear, self.rgb_linear = nn.Linear(W + n_views, W // 2), nn.Linear(W // 2, 3)

    def forward(self, pts, views):
        h = pts
        for i, layer in enumerate(self.pts_linears):
            h = torch.relu(layer(h))
            if i == self.skip:
                h = torch.cat([pts, h], -1)
        alpha = self.alpha_linear(h)
        h = torch.relu(self.views_linear(torch.cat([self.feature_linear(h), views], -1)))
        return torch.cat([self.rgb_linear(h), alpha], -1)


def raw2outputs(raw, z_vals, rays_d):
    dists = z_vals[..., 1:] - z_vals[..., :-1]
    dists = torch.cat([dists, torch.full_like(dists[..., :1], 1e10)], -1)
    dists = dists * torch.norm(rays_d[..., None, :], dim=-1)
    rgb = torch.sigmoid(raw[..., :3])
    alpha = 1.0 - torch.exp(-torch.relu(raw[..., 3]) * dists)
    ones = torch.ones((alpha.shape[0], 1), device=alpha.device)
    weights = alpha * torch.cumprod(torch.cat([ones, 1.0 - alpha + 1e-10], -1), -1)[:, :-1]
    return torch.sum(weights[..., None] * rgb, -2), weights


def sample_pdf(bins, weights, n):
    weights = weights + 1e-5
    pdf = weights / torch.sum(weights, -1, keepdim=True)
    cdf = torch.cumsum(pdf, -1)
    cdf = torch.cat([torch.zeros_like(cdf[..., :1]), cdf], -1)
    u = torch.rand([*cdf.shape[:-1], n], device=cdf.device)
    inds = torch.searchsorted(cdf, u.contiguous(), right=True)
    below, above = torch.clamp(inds - 1, min=0), torch.clamp(inds, max=cdf.shape[-1] - 1)
    cdf0, cdf1 = torch.gather(cdf, -1, below), torch.gather(cdf, -1, above)
    bins0, bins1 = torch.gather(bins, -1, below), torch.gather(bins, -1, above)
    denom = cdf1 - cdf0
    denom = torch.where(denom < 1e-5, torch.ones_like(denom), denom)
    return bins0 + (u - cdf0) / denom * (bins1 - bins0)


class Trainer:
    def __init__(self, n_samples=64, n_importance=64, lrate=5e-4, near=2.0, far=6.0):
        self.n_samples, self.n_importance, self.near, self.far = n_samples, n_importance, near, far
        self.model, self.model_fine = NeRF().cuda(), NeRF().cuda()
        self.optimizer = torch.optim.Adam([*self.model.parameters(), *self.model_fine.parameters()], lr=lrate)
        self.lrate, self.global_step = lrate, 0

    def run_network(self, net, rays_o, rays_d, z_vals):
        pts = rays_o[..., None, :] + rays_d[..., None, :] * z_vals[..., :, None]
        views = (rays_d / rays_d.norm(dim=-1, keepdim=True))[:, None].expand(pts.shape)
        return net(posenc(pts, 10), posenc(views, 4))

    def render(self, rays_o, rays_d):
        t = torch.linspace(0.0, 1.0, self.n_samples, device="cuda")
        z_vals = (self.near * (1.0 - t) + self.far * t).expand(rays_o.shape[0], self.n_samples)
        mids = 0.5 * (z_vals[..., 1:] + z_vals[..., :-1])
        upper, lower = torch.cat([mids, z_vals[..., -1:]], -1), torch.cat([z_vals[..., :1], mids], -1)
        z_vals = lower + (upper - lower) * torch.rand_like(z_vals)
        rgb0, weights = raw2outputs(self.run_network(self.model, rays_o, rays_d, z_vals), z_vals, rays_d)
        z_mid = 0.5 * (z_vals[..., 1:] + z_vals[..., :-1])
        z_samples = sample_pdf(z_mid, weights[..., 1:-1], self.n_importance).detach()
        z_vals, _ = torch.sort(torch.cat([z_vals, z_samples], -1), -1)
        rgb, _ = raw2outputs(self.run_network(self.model_fine, rays_o, rays_d, z_vals), z_vals, rays_d)
        return rgb, rgb0

    def step(self, rays_o, rays_d, target):
        rays_o, rays_d, target = rays_o.cuda(), rays_d.cuda(), target.cuda()
        rgb, rgb0 = self.render(rays_o, rays_d)
        self.optimizer.zero_grad()
        img_loss = torch.mean((rgb - target) ** 2)
        loss = img_loss + torch.mean((rgb0 - target) ** 2)
        loss.backward()
        self.optimizer.step()
        for group in self.optimizer.param_groups:
            group["lr"] = self.lrate * 0.1 ** (self.global_step / 250_000)
        self.global_step += 1
        return loss.item(), -10.0 * torch.log10(img_loss.detach()).item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=1024, help="rays in a step")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    trainer = Trainer()
    for _ in range(args.steps):
        print(
            trainer.step(
                torch.rand(args.batch_size, 3),
                torch.randn(args.batch_size, 3),
                torch.rand(args.batch_size, 3),
            )
        )
