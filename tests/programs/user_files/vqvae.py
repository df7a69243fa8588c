"""VQ-VAE whose quantization is an autograd.Function of its own."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd import Function
from torch.utils.data import DataLoader, TensorDataset


class VectorQuantization(Function):
    @staticmethod
    def forward(ctx, inputs, codebook):
        with torch.no_grad():
            inputs_flatten = inputs.view(-1, codebook.size(1))
            codebook_sqr = torch.sum(codebook**2, dim=1)
            inputs_sqr = torch.sum(inputs_flatten**2, dim=1, keepdim=True)
            distances = torch.addmm(
                codebook_sqr + inputs_sqr, inputs_flatten, codebook.t(), alpha=-2.0, beta=1.0
            )
            _, indices_flatten = torch.min(distances, dim=1)
            indices = indices_flatten.view(*inputs.size()[:-1])
            ctx.mark_non_differentiable(indices)
            return indices

    @staticmethod
    def backward(ctx, grad_output):
        raise RuntimeError("call VectorQuantizationStraightThrough instead")


class VectorQuantizationStraightThrough(Function):
    @staticmethod
    def forward(ctx, inputs, codebook):
        indices = vq(inputs, codebook)
        indices_flatten = indices.view(-1)
        ctx.save_for_backward(indices_flatten, codebook)
        ctx.mark_non_differentiable(indices_flatten)
        codes = torch.index_select(codebook, dim=0, index=indices_flatten).view_as(inputs)
        return codes, indices_flatten

    @staticmethod
    def backward(ctx, grad_output, grad_indices):
        grad_inputs, grad_codebook = None, None
        if ctx.needs_input_grad[0]:
            grad_inputs = grad_output.clone()
        if ctx.needs_input_grad[1]:
            indices, codebook = ctx.saved_tensors
            flat = grad_output.contiguous().view(-1, codebook.size(1))
            grad_codebook = torch.zeros_like(codebook)
            grad_codebook.index_add_(0, indices, flat)
        return grad_inputs, grad_codebook


vq, vq_st = VectorQuantization.apply, VectorQuantizationStraightThrough.apply


class ResBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.block = nn.Sequential(
            nn.ReLU(True),
            nn.Conv2d(dim, dim, 3, 1, 1),
            nn.BatchNorm2d(dim),
            nn.ReLU(True),
            nn.Conv2d(dim, dim, 1),
            nn.BatchNorm2d(dim),
        )

    def forward(self, x):
        return x + self.block(x)


class VQVAE(nn.Module):
    def __init__(self, dim=128, K=512):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, dim, 4, 2, 1),
            nn.BatchNorm2d(dim),
            nn.ReLU(True),
            nn.Conv2d(dim, dim, 4, 2, 1),
            ResBlock(dim),
            ResBlock(dim),
        )
        self.codebook = nn.Embedding(K, dim)
        self.codebook.weight.data.uniform_(-1.0 / K, 1.0 / K)
        self.decoder = nn.Sequential(
            ResBlock(dim),
            ResBlock(dim),
            nn.ReLU(True),
            nn.ConvTranspose2d(dim, dim, 4, 2, 1),
            nn.BatchNorm2d(dim),
            nn.ReLU(True),
            nn.ConvTranspose2d(dim, 3, 4, 2, 1),
            nn.Tanh(),
        )

    def straight_through(self, z_e_x):
        z_e_x_ = z_e_x.permute(0, 2, 3, 1).contiguous()
        z_q_x_, indices = vq_st(z_e_x_, self.codebook.weight.detach())
        z_q_x = z_q_x_.permute(0, 3, 1, 2).contiguous()
        z_q_x_bar_ = torch.index_select(self.codebook.weight, dim=0, index=indices).view_as(z_e_x_)
        return z_q_x, z_q_x_bar_.permute(0, 3, 1, 2).contiguous()

    def forward(self, x):
        z_e_x = self.encoder(x)
        z_q_x_st, z_q_x = self.straight_through(z_e_x)
        return self.decoder(z_q_x_st), z_e_x, z_q_x


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = VQVAE().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)


def train_step(images, beta=1.0):
    images = images.to(device)
    optimizer.zero_grad()
    x_tilde, z_e_x, z_q_x = model(images)
    loss_recons = F.mse_loss(x_tilde, images)
    loss_vq = F.mse_loss(z_q_x, z_e_x.detach())
    loss_commit = F.mse_loss(z_e_x, z_q_x.detach())
    loss = loss_recons + loss_vq + beta * loss_commit
    loss.backward()
    optimizer.step()
    return loss_recons.item(), loss_vq.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    data = TensorDataset(torch.rand(args.batch_size * args.steps, 3, 64, 64))
    for (images,) in DataLoader(data, batch_size=args.batch_size, shuffle=True, drop_last=True):
        print(train_step(images))
