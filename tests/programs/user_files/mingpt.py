"""A Trainer class with callbacks around a character-level transformer."""

import argparse
import time
from collections import defaultdict

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Config:
    vocab_size, block_size = 65, 128
    n_layer, n_head, n_embd = 6, 6, 192
    learning_rate, betas, weight_decay, grad_norm_clip = 3e-4, (0.9, 0.95), 0.1, 1.0
    max_iters, batch_size, num_workers = 3, 64, 0


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.attn_dropout, self.resid_dropout = nn.Dropout(0.1), nn.Dropout(0.1)
        mask = torch.tril(torch.ones(config.block_size, config.block_size))
        self.register_buffer("bias", mask.view(1, 1, config.block_size, config.block_size))
        self.n_head, self.n_embd = config.n_head, config.n_embd

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (k.size(-1) ** -0.5)
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = self.attn_dropout(F.softmax(att, dim=-1))
        y = (att @ v).transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(config.n_embd), nn.LayerNorm(config.n_embd)
        self.attn = CausalSelfAttention(config)
        self.mlp = nn.Sequential(
            nn.Linear(config.n_embd, 4 * config.n_embd),
            nn.GELU(),
            nn.Linear(4 * config.n_embd, config.n_embd),
            nn.Dropout(0.1),
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.blocks = nn.Sequential(*[Block(config) for _ in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def configure_optimizers(self, config):
        decay, no_decay = set(), set()
        for mn, m in self.named_modules():
            for pn, _ in m.named_parameters(recurse=False):
                name = f"{mn}.{pn}" if mn else pn
                (decay if pn.endswith("weight") and isinstance(m, nn.Linear) else no_decay).add(name)
        params = dict(self.named_parameters())
        groups = [
            {"params": [params[n] for n in sorted(decay)], "weight_decay": config.weight_decay},
            {"params": [params[n] for n in sorted(no_decay)], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas)

    def forward(self, idx, targets=None):
        pos = torch.arange(idx.size(1), dtype=torch.long, device=idx.device).unsqueeze(0)
        x = self.ln_f(self.blocks(self.wte(idx) + self.wpe(pos)))
        logits = self.head(x)
        loss = None
        if targets is not None:
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


class CharDataset(Dataset):
    def __init__(self, config, length):
        self.block_size = config.block_size
        self.data = torch.randint(config.vocab_size, (length + config.block_size,))
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, idx):
        chunk = self.data[idx : idx + self.block_size + 1]
        return chunk[:-1], chunk[1:]


class Trainer:
    def __init__(self, config, model):
        self.config = config
        self.callbacks = defaultdict(list)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = model.to(self.device)
        self.optimizer = model.configure_optimizers(config)
        self.iter_num, self.iter_time, self.iter_dt = 0, time.time(), 0.0

    def add_callback(self, onevent, callback):
        self.callbacks[onevent].append(callback)

    def trigger_callbacks(self, onevent):
        for callback in self.callbacks.get(onevent, []):
            callback(self)

    def step(self, batch):
        self.model.train()
        x, y = [t.to(self.device) for t in batch]
        logits, self.loss = self.model(x, y)
        self.model.zero_grad(set_to_none=True)
        self.loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_norm_clip)
        self.optimizer.step()
        self.trigger_callbacks("on_batch_end")
        self.iter_num += 1
        now = time.time()
        self.iter_dt, self.iter_time = now - self.iter_time, now

    def run(self, dataset):
        loader = DataLoader(dataset, shuffle=True, pin_memory=True, batch_size=self.config.batch_size)
        for batch in loader:
            self.step(batch)
            if self.iter_num >= self.config.max_iters:
                break


def batch_end_callback(trainer):
    if trainer.iter_num % 10 == 0:
        print(
            f"iter_dt {trainer.iter_dt * 1000:.2f}ms; iter {trainer.iter_num}: loss {trainer.loss.item():.5f}"
        )


def make_trainer(config=None):
    config = config or Config()
    trainer = Trainer(config, GPT(config))
    trainer.add_callback("on_batch_end", batch_end_callback)
    return trainer


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    config = Config()
    config.batch_size, config.max_iters = args.batch_size, args.steps
    make_trainer(config).run(CharDataset(config, args.batch_size * args.steps))
