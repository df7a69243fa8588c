"""Translate with nn.Transformer: padded batches, label smoothing, the schedule of warm-up and decay."""

import argparse
import math

import torch
import torch.nn as nn
from torch.nn import Transformer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SRC_VOCAB, TGT_VOCAB, EMB, NHEAD, FFN, LAYERS = 19000, 11000, 512, 8, 512, 3
PAD_IDX = 1


class PositionalEncoding(nn.Module):
    def __init__(self, emb_size, dropout, maxlen=5000):
        super().__init__()
        den = torch.exp(-torch.arange(0, emb_size, 2) * math.log(10000) / emb_size)
        pos = torch.arange(0, maxlen).reshape(maxlen, 1)
        pos_embedding = torch.zeros((maxlen, emb_size))
        pos_embedding[:, 0::2] = torch.sin(pos * den)
        pos_embedding[:, 1::2] = torch.cos(pos * den)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("pos_embedding", pos_embedding.unsqueeze(-2))

    def forward(self, token_embedding):
        return self.dropout(token_embedding + self.pos_embedding[: token_embedding.size(0), :])


class Seq2SeqTransformer(nn.Module):
    def __init__(self, dropout=0.1):
        super().__init__()
        self.transformer = Transformer(EMB, NHEAD, LAYERS, LAYERS, FFN, dropout)
        self.generator = nn.Linear(EMB, TGT_VOCAB)
        self.src_tok_emb, self.tgt_tok_emb = nn.Embedding(SRC_VOCAB, EMB), nn.Embedding(TGT_VOCAB, EMB)
        self.positional_encoding = PositionalEncoding(EMB, dropout)

    def forward(self, src, trg, src_mask, tgt_mask, src_padding_mask, tgt_padding_mask):
        src_emb = self.positional_encoding(self.src_tok_emb(src) * math.sqrt(EMB))
        tgt_emb = self.positional_encoding(self.tgt_tok_emb(trg) * math.sqrt(EMB))
        outs = self.transformer(
            src_emb, tgt_emb, src_mask, tgt_mask, None, src_padding_mask, tgt_padding_mask, src_padding_mask
        )
        return self.generator(outs)


def generate_square_subsequent_mask(sz):
    mask = (torch.triu(torch.ones((sz, sz), device=DEVICE)) == 1).transpose(0, 1)
    return mask.float().masked_fill(mask == 0, float("-inf")).masked_fill(mask == 1, 0.0)


def create_mask(src, tgt):
    tgt_mask = generate_square_subsequent_mask(tgt.shape[0])
    src_mask = torch.zeros((src.shape[0], src.shape[0]), device=DEVICE).type(torch.bool)
    return src_mask, tgt_mask, (src == PAD_IDX).transpose(0, 1), (tgt == PAD_IDX).transpose(0, 1)


torch.manual_seed(0)
transformer = Seq2SeqTransformer()
for p in transformer.parameters():
    if p.dim() > 1:
        nn.init.xavier_uniform_(p)
transformer = transformer.to(DEVICE)
loss_fn = torch.nn.CrossEntropyLoss(ignore_index=PAD_IDX, label_smoothing=0.1)
optimizer = torch.optim.Adam(transformer.parameters(), lr=1.0, betas=(0.9, 0.98), eps=1e-9)
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda step: EMB**-0.5 * min((step + 1) ** -0.5, (step + 1) * 4000**-1.5)
)


def train_step(src, tgt):
    transformer.train()
    src, tgt = src.t().to(DEVICE), tgt.t().to(DEVICE)  # (length, batch)
    tgt_input = tgt[:-1, :]
    src_mask, tgt_mask, src_padding_mask, tgt_padding_mask = create_mask(src, tgt_input)
    logits = transformer(src, tgt_input, src_mask, tgt_mask, src_padding_mask, tgt_padding_mask)
    optimizer.zero_grad()
    tgt_out = tgt[1:, :]
    loss = loss_fn(logits.reshape(-1, logits.shape[-1]), tgt_out.reshape(-1))
    loss.backward()
    optimizer.step()
    scheduler.step()
    return loss.item()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    losses = 0
    for _ in range(args.steps):
        losses += train_step(
            torch.randint(4, 11000, (args.batch_size, 40)), torch.randint(4, 11000, (args.batch_size, 41))
        )
    print(losses / args.steps)
