"""A notebook's cells: LoRA by hand on GPT-2."""

# %%
import argparse
import math

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

device = "cuda"

# %%
config = GPT2Config(n_layer=6, n_embd=512, n_head=8, resid_pdrop=0.0, attn_pdrop=0.0)
model = GPT2LMHeadModel(config)
for param in model.parameters():
    param.requires_grad = False


# %%
class LoRA(nn.Module):
    def __init__(self, base, n_in, n_out, r=8, alpha=16, dropout=0.05):
        super().__init__()
        self.base = base
        self.A = nn.Parameter(torch.empty(n_in, r))
        self.B = nn.Parameter(torch.zeros(r, n_out))
        nn.init.kaiming_uniform_(self.A, a=math.sqrt(5))
        self.scaling = alpha / r
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.base(x) + (self.dropout(x) @ self.A @ self.B) * self.scaling


for block in model.transformer.h:
    block.attn.c_attn = LoRA(block.attn.c_attn, config.n_embd, 3 * config.n_embd)
    block.attn.c_proj = LoRA(block.attn.c_proj, config.n_embd, config.n_embd)

model.to(device)
model.train()
trainable = [p for p in model.parameters() if p.requires_grad]
total = sum(p.numel() for p in model.parameters())
print(f"trainable: {sum(p.numel() for p in trainable):,} of {total:,}")

# %%
optimizer = torch.optim.AdamW(trainable, lr=2e-4)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 100))
losses = []


def train_step(input_ids):
    input_ids = input_ids.to(device)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = model(input_ids=input_ids, labels=input_ids)
    out.loss.backward()
    torch.nn.utils.clip_grad_norm_(trainable, 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    losses.append(out.loss.detach().cpu().item())
    return out.loss


# %%
if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    for step in range(args.steps):
        loss = train_step(torch.randint(config.vocab_size, (args.batch_size, 256)))
    print(losses)
