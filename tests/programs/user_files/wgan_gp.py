"""WGAN with a gradient penalty: several critic updates for each of the generator's."""

import argparse

import torch
from torch import autograd, nn, optim


class Generator(nn.Module):
    def __init__(self, z_dim=128, dim=64):
        super().__init__()
        self.dim = dim
        self.preprocess = nn.Sequential(
            nn.Linear(z_dim, 4 * 4 * 4 * dim), nn.BatchNorm1d(4 * 4 * 4 * dim), nn.ReLU(True)
        )
        self.block1 = nn.Sequential(
            nn.ConvTranspose2d(4 * dim, 2 * dim, 2, stride=2), nn.BatchNorm2d(2 * dim), nn.ReLU(True)
        )
        self.block2 = nn.Sequential(
            nn.ConvTranspose2d(2 * dim, dim, 2, stride=2), nn.BatchNorm2d(dim), nn.ReLU(True)
        )
        self.deconv_out = nn.ConvTranspose2d(dim, 3, 2, stride=2)

    def forward(self, z):
        out = self.preprocess(z).view(-1, 4 * self.dim, 4, 4)
        return torch.tanh(self.deconv_out(self.block2(self.block1(out))))


class Discriminator(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(3, dim, 3, 2, padding=1),
            nn.LeakyReLU(),
            nn.Conv2d(dim, 2 * dim, 3, 2, padding=1),
            nn.LeakyReLU(),
            nn.Conv2d(2 * dim, 4 * dim, 3, 2, padding=1),
            nn.LeakyReLU(),
        )
        self.linear = nn.Linear(4 * 4 * 4 * dim, 1)

    def forward(self, x):
        return self.linear(self.main(x).flatten(1))


class WGAN:
    def __init__(self, z_dim=128, critic_iters=5, lambda_gp=10, lr=1e-4):
        self.z_dim, self.critic_iters, self.lambda_gp = z_dim, critic_iters, lambda_gp
        self.G = Generator(z_dim).cuda()
        self.D = Discriminator().cuda()
        self.optimizer_g = optim.Adam(self.G.parameters(), lr=lr, betas=(0.5, 0.9))
        self.optimizer_d = optim.Adam(self.D.parameters(), lr=lr, betas=(0.5, 0.9))

    def gradient_penalty(self, real, fake):
        alpha = torch.rand(real.size(0), 1, 1, 1, device="cuda")
        interpolates = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
        disc = self.D(interpolates)
        gradients = autograd.grad(
            outputs=disc,
            inputs=interpolates,
            grad_outputs=torch.ones_like(disc),
            create_graph=True,
            retain_graph=True,
            only_inputs=True,
        )[0]
        gradients = gradients.view(gradients.size(0), -1)
        return ((gradients.norm(2, dim=1) - 1) ** 2).mean() * self.lambda_gp

    def step(self, real):
        real = real.cuda()
        for p in self.D.parameters():
            p.requires_grad = True
        for _ in range(self.critic_iters):
            self.optimizer_d.zero_grad()
            d_real = self.D(real).mean()
            noise = torch.randn(real.size(0), self.z_dim, device="cuda")
            with torch.no_grad():
                fake = self.G(noise)
            d_fake = self.D(fake).mean()
            penalty = self.gradient_penalty(real, fake)
            d_cost = d_fake - d_real + penalty
            d_cost.backward()
            self.optimizer_d.step()
        for p in self.D.parameters():
            p.requires_grad = False
        self.optimizer_g.zero_grad()
        noise = torch.randn(real.size(0), self.z_dim, device="cuda")
        g_cost = -self.D(self.G(noise)).mean()
        g_cost.backward()
        self.optimizer_g.step()
        return (d_real - d_fake).item(), g_cost.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    wgan = WGAN()
    for _ in range(args.steps):
        print(wgan.step(torch.rand(args.batch_size, 3, 32, 32) * 2 - 1))
