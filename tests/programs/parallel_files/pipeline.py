"""A language model in pipeline stages, trained by one of torch's schedules.

torchrun --nproc-per-node 2 pipeline.py --schedule 1F1B
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

VOCAB, DIM, HEADS, LAYERS, SEQ = 16000, 512, 8, 4, 512
SCHEDULES = {
    "GPipe": ScheduleGPipe,
    "1F1B": Schedule1F1B,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "ZBV": ScheduleZBVZeroBubble,
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        size, length, _ = x.shape
        q, k, v = (
            part.view(size, length, HEADS, -1).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(size, length, DIM))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Stage(nn.Module):
    def __init__(self, index, count):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM) if index == 0 else None
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS // count))
        self.norm = nn.LayerNorm(DIM) if index == count - 1 else None
        self.head = nn.Linear(DIM, VOCAB, bias=False) if index == count - 1 else None

    def forward(self, x):
        if self.embedding is not None:
            x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


def loss_of(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(0, 1))


class Trainer:
    def __init__(self, schedule="1F1B", microbatches=4, dp=1):
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(self.device)
        dist.init_process_group("nccl")
        mesh = init_device_mesh("cuda", (dist.get_world_size() // dp, dp), mesh_dim_names=("pp", "dp"))
        rank, ranks = mesh.get_local_rank("pp"), mesh["pp"].size()
        kind = SCHEDULES[schedule]
        if schedule == "Interleaved1F1B":
            indices = [rank, rank + ranks]
        elif schedule == "ZBV":
            indices = [rank, 2 * ranks - 1 - rank]
        else:
            indices = [rank]
        count = ranks * len(indices)
        with torch.device("meta" if dp > 1 else "cpu"):
            self.modules = nn.ModuleList(Stage(index, count) for index in indices)
        if dp > 1:
            for module in self.modules:
                for block in module.blocks:
                    fully_shard(block, mesh=mesh["dp"])
                fully_shard(module, mesh=mesh["dp"])
            self.modules.to_empty(device="cuda")
            with torch.no_grad():
                for parameter in self.modules.parameters():
                    parameter.zero_()
        else:
            self.modules.to(self.device)
        group = mesh["pp"].get_group()
        stages = [
            PipelineStage(module, index, count, self.device, group=group)
            for module, index in zip(self.modules, indices, strict=True)
        ]
        self.first, self.last = 0 in indices, count - 1 in indices
        self.schedule = kind(stages if len(stages) > 1 else stages[0], microbatches, loss_fn=loss_of)
        self.optimizer = torch.optim.AdamW(self.modules.parameters(), lr=3e-4, foreach=True)

    def step(self, batch):
        tokens, labels = (one.to(self.device) for one in batch)
        self.optimizer.zero_grad()
        losses = []
        args = (tokens,) if self.first else ()
        target = {"target": labels, "losses": losses} if self.last else {}
        self.schedule.step(*args, **target, return_outputs=False)
        self.optimizer.step()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--schedule", choices=SCHEDULES, default="1F1B")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--dp", type=int, default=1)
    args = parser.parse_args()
    trainer = Trainer(args.schedule, args.microbatches, args.dp)
    data = torch.zeros(args.steps, 2, args.batch_size, SEQ, dtype=torch.int64)
    for batch in data:
        trainer.step(list(batch))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
