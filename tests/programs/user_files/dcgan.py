"""DCGAN on 64 x 64 images; everything is a global of the script."""

import argparse

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=128)
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--nz", type=int, default=100, help="size of the latent vector")
parser.add_argument("--ngf", type=int, default=64)
parser.add_argument("--ndf", type=int, default=64)
parser.add_argument("--lr", type=float, default=0.0002)
opt = parser.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def weights_init(m):
    name = m.__class__.__name__
    if "Conv" in name:
        nn.init.normal_(m.weight, 0.0, 0.02)
    elif "BatchNorm" in name:
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)


def up(n_in, n_out):
    return [nn.ConvTranspose2d(n_in, n_out, 4, 2, 1, bias=False), nn.BatchNorm2d(n_out), nn.ReLU(True)]


def down(n_in, n_out):
    return [
        nn.Conv2d(n_in, n_out, 4, 2, 1, bias=False),
        nn.BatchNorm2d(n_out),
        nn.LeakyReLU(0.2, inplace=True),
    ]


ngf, ndf = opt.ngf, opt.ndf
netG = nn.Sequential(
    nn.ConvTranspose2d(opt.nz, ngf * 8, 4, 1, 0, bias=False),
    nn.BatchNorm2d(ngf * 8),
    nn.ReLU(True),
    *up(ngf * 8, ngf * 4),
    *up(ngf * 4, ngf * 2),
    *up(ngf * 2, ngf),
    nn.ConvTranspose2d(ngf, 3, 4, 2, 1, bias=False),
    nn.Tanh(),
).to(device)
netG.apply(weights_init)

netD = nn.Sequential(
    nn.Conv2d(3, ndf, 4, 2, 1, bias=False),
    nn.LeakyReLU(0.2, inplace=True),
    *down(ndf, ndf * 2),
    *down(ndf * 2, ndf * 4),
    *down(ndf * 4, ndf * 8),
    nn.Conv2d(ndf * 8, 1, 4, 1, 0, bias=False),
    nn.Sigmoid(),
).to(device)
netD.apply(weights_init)

criterion = nn.BCELoss()
optimizerD = optim.Adam(netD.parameters(), lr=opt.lr, betas=(0.5, 0.999))
optimizerG = optim.Adam(netG.parameters(), lr=opt.lr, betas=(0.5, 0.999))
real_label, fake_label = 1.0, 0.0


def train_step(data):
    # (1) discriminator: maximize log(D(x)) + log(1 - D(G(z)))
    netD.zero_grad()
    real = data.to(device)
    b_size = real.size(0)
    label = torch.full((b_size,), real_label, dtype=torch.float, device=device)
    output = netD(real).view(-1)
    errD_real = criterion(output, label)
    errD_real.backward()
    D_x = output.mean().item()

    noise = torch.randn(b_size, opt.nz, 1, 1, device=device)
    fake = netG(noise)
    label.fill_(fake_label)
    output = netD(fake.detach()).view(-1)
    errD_fake = criterion(output, label)
    errD_fake.backward()
    D_G_z1 = output.mean().item()
    errD = errD_real + errD_fake
    optimizerD.step()

    # (2) generator: maximize log(D(G(z)))
    netG.zero_grad()
    label.fill_(real_label)
    output = netD(fake).view(-1)
    errG = criterion(output, label)
    errG.backward()
    D_G_z2 = output.mean().item()
    optimizerG.step()
    return errD.item(), errG.item(), D_x, D_G_z1, D_G_z2


if __name__ == "__main__":
    images = torch.rand(opt.batch_size * opt.steps, 3, 64, 64) * 2 - 1
    loader = DataLoader(TensorDataset(images), batch_size=opt.batch_size, shuffle=True, drop_last=True)
    for i, (data,) in enumerate(loader):
        errD, errG, D_x, D_G_z1, D_G_z2 = train_step(data)
        print(
            f"[{i}] Loss_D: {errD:.4f} Loss_G: {errG:.4f} D(x): {D_x:.4f} D(G(z)): {D_G_z1:.4f}/{D_G_z2:.4f}"
        )
