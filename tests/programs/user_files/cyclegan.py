"""CycleGAN: two generators under one optimizer, two discriminators, pools of generated images."""

import argparse
import functools
import itertools
import random

import torch
from torch import nn


class ImagePool:
    def __init__(self, pool_size):
        self.pool_size, self.num_imgs, self.images = pool_size, 0, []

    def query(self, images):
        return_images = []
        for image in images:
            image = torch.unsqueeze(image.data, 0)
            if self.num_imgs < self.pool_size:
                self.num_imgs += 1
                self.images.append(image)
                return_images.append(image)
            elif random.uniform(0, 1) > 0.5:
                random_id = random.randint(0, self.pool_size - 1)
                tmp = self.images[random_id].clone()
                self.images[random_id] = image
                return_images.append(tmp)
            else:
                return_images.append(image)
        return torch.cat(return_images, 0)


norm_layer = functools.partial(nn.InstanceNorm2d, affine=False, track_running_stats=False)


class ResnetBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.conv_block = nn.Sequential(
            nn.ReflectionPad2d(1),
            nn.Conv2d(dim, dim, 3),
            norm_layer(dim),
            nn.ReLU(True),
            nn.ReflectionPad2d(1),
            nn.Conv2d(dim, dim, 3),
            norm_layer(dim),
        )

    def forward(self, x):
        return x + self.conv_block(x)


def define_G(ngf=32, n_blocks=6):
    model = [nn.ReflectionPad2d(3), nn.Conv2d(3, ngf, 7), norm_layer(ngf), nn.ReLU(True)]
    for i in range(2):
        n = ngf * 2**i
        model += [nn.Conv2d(n, n * 2, 3, stride=2, padding=1), norm_layer(n * 2), nn.ReLU(True)]
    model += [ResnetBlock(ngf * 4) for _ in range(n_blocks)]
    for i in (2, 1):
        n = ngf * 2**i
        model += [
            nn.ConvTranspose2d(n, n // 2, 3, stride=2, padding=1, output_padding=1),
            norm_layer(n // 2),
            nn.ReLU(True),
        ]
    return nn.Sequential(*model, nn.ReflectionPad2d(3), nn.Conv2d(ngf, 3, 7), nn.Tanh())


def define_D(ndf=64):
    layers, n = [nn.Conv2d(3, ndf, 4, 2, 1), nn.LeakyReLU(0.2, True)], ndf
    for stride in (2, 2, 1):
        layers += [nn.Conv2d(n, n * 2, 4, stride, 1), norm_layer(n * 2), nn.LeakyReLU(0.2, True)]
        n *= 2
    return nn.Sequential(*layers, nn.Conv2d(n, 1, 4, 1, 1))


class CycleGANModel:
    def __init__(self, lr=2e-4, lambda_cycle=10.0, lambda_idt=0.5, pool_size=50):
        self.device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
        self.netG_A, self.netG_B = define_G().to(self.device), define_G().to(self.device)
        self.netD_A, self.netD_B = define_D().to(self.device), define_D().to(self.device)
        self.fake_A_pool, self.fake_B_pool = ImagePool(pool_size), ImagePool(pool_size)
        self.criterionGAN, self.criterionCycle, self.criterionIdt = nn.MSELoss(), nn.L1Loss(), nn.L1Loss()
        self.lambda_cycle, self.lambda_idt = lambda_cycle, lambda_idt
        g, d = (
            itertools.chain(a.parameters(), b.parameters())
            for a, b in ((self.netG_A, self.netG_B), (self.netD_A, self.netD_B))
        )
        self.optimizer_G = torch.optim.Adam(g, lr=lr, betas=(0.5, 0.999))
        self.optimizer_D = torch.optim.Adam(d, lr=lr, betas=(0.5, 0.999))

    def set_requires_grad(self, nets, requires_grad):
        for net in nets:
            for param in net.parameters():
                param.requires_grad = requires_grad

    def gan_loss(self, prediction, is_real):
        target = torch.tensor(1.0 if is_real else 0.0).to(self.device).expand_as(prediction)
        return self.criterionGAN(prediction, target)

    def set_input(self, batch):
        self.real_A, self.real_B = batch["A"].to(self.device), batch["B"].to(self.device)

    def forward(self):
        self.fake_B = self.netG_A(self.real_A)
        self.rec_A = self.netG_B(self.fake_B)
        self.fake_A = self.netG_B(self.real_B)
        self.rec_B = self.netG_A(self.fake_A)

    def backward_D_basic(self, net, real, fake):
        loss = (self.gan_loss(net(real), True) + self.gan_loss(net(fake.detach()), False)) * 0.5
        loss.backward()
        return loss

    def backward_G(self):
        self.idt_A, self.idt_B = self.netG_A(self.real_B), self.netG_B(self.real_A)
        scale = self.lambda_cycle * self.lambda_idt
        self.loss_idt = (
            self.criterionIdt(self.idt_A, self.real_B) + self.criterionIdt(self.idt_B, self.real_A)
        ) * scale
        self.loss_G_A = self.gan_loss(self.netD_A(self.fake_B), True)
        self.loss_G_B = self.gan_loss(self.netD_B(self.fake_A), True)
        self.loss_cycle = self.criterionCycle(self.rec_A, self.real_A) + self.criterionCycle(
            self.rec_B, self.real_B
        )
        self.loss_G = self.loss_G_A + self.loss_G_B + self.lambda_cycle * self.loss_cycle + self.loss_idt
        self.loss_G.backward()

    def optimize_parameters(self, batch):
        self.set_input(batch)
        self.forward()
        self.set_requires_grad([self.netD_A, self.netD_B], False)
        self.optimizer_G.zero_grad()
        self.backward_G()
        self.optimizer_G.step()
        self.set_requires_grad([self.netD_A, self.netD_B], True)
        self.optimizer_D.zero_grad()
        self.loss_D_A = self.backward_D_basic(self.netD_A, self.real_B, self.fake_B_pool.query(self.fake_B))
        self.loss_D_B = self.backward_D_basic(self.netD_B, self.real_A, self.fake_A_pool.query(self.fake_A))
        self.optimizer_D.step()

    def get_current_losses(self):
        return {name: float(getattr(self, "loss_" + name)) for name in ("G", "D_A", "D_B", "cycle", "idt")}


model = CycleGANModel()


def train_step(batch):
    model.optimize_parameters(batch)
    return model.get_current_losses()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    for epoch_iter in range(args.steps):
        batch = {
            "A": torch.rand(args.batch_size, 3, 256, 256) * 2 - 1,
            "B": torch.rand(args.batch_size, 3, 256, 256) * 2 - 1,
        }
        print(epoch_iter, train_step(batch))
