"""Train GPT-2 by hand and evaluate it by generating text, with a cache of keys and values."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_layer=8)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(3):
    ids = torch.randint(0, 50257, (8, 512)).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
model.eval()
start = torch.randint(0, 50257, (16, 128)).cuda()
with torch.no_grad():
    model.generate(
        start,
        attention_mask=torch.ones_like(start),
        min_new_tokens=64,
        max_new_tokens=64,
        do_sample=False,
        pad_token_id=50256,
    )
