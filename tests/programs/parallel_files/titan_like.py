"""A language model with tensor, sequence and loss parallel within FSDP2, set up as torchtitan does.

torchrun --nproc-per-node 4 titan_like.py --tp 2 --dp 2
"""

import argparse
import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

VOCAB, DIM, HEADS, LAYERS, SEQ = 16000, 512, 8, 3, 512


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))
        self.wo = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x):
        size, length, _ = x.shape
        q, k, v = (
            w(x).view(size, length, -1, DIM // HEADS).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(size, length, -1))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = nn.Linear(DIM, 4 * DIM, bias=False), nn.Linear(DIM, 4 * DIM, bias=False)
        self.w2 = nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleDict({str(number): Block() for number in range(LAYERS)})
        self.norm = nn.RMSNorm(DIM)
        self.output = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.output(self.norm(x))


def apply_float8(model, is_gathered):
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=is_gathered)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: name != "output")


def apply_tp(model, mesh, with_loss_parallel, has_float8=False):
    styles = (ColwiseParallel, RowwiseParallel, PrepareModuleInput)
    if has_float8:
        from torchao.float8 import float8_tensor_parallel as float8

        styles = (float8.Float8ColwiseParallel, float8.Float8RowwiseParallel, float8.PrepareFloat8ModuleInput)
    column, row, prepare = styles
    parallelize_module(
        model,
        mesh,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(
                input_layouts=Shard(1),
                output_layouts=Shard(-1) if with_loss_parallel else Replicate(),
                use_local_output=not with_loss_parallel,
            ),
        },
    )
    for block in model.layers.values():
        plan = {
            "attention_norm": SequenceParallel(),
            "attention": prepare(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "attention.wq": column(),
            "attention.wk": column(),
            "attention.wv": column(),
            "attention.wo": row(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": prepare(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "feed_forward.w1": column(),
            "feed_forward.w2": row(output_layouts=Shard(1)),
            "feed_forward.w3": column(),
        }
        parallelize_module(block, mesh, plan)


class Trainer:
    def __init__(
        self, tp=2, dp=1, gather_logits=False, checkpoint=False, mixed=False, float8="", compiled=False
    ):
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(self.device)
        init_process_group("nccl")
        mesh = init_device_mesh("cuda", (dp, tp), mesh_dim_names=("dp", "tp"))
        self.loss_parallel = tp > 1 and not gather_logits
        with torch.device("meta"):
            model = Transformer()
        if float8:
            apply_float8(model, is_gathered=float8 == "gathered")
        if tp > 1:
            apply_tp(model, mesh["tp"], self.loss_parallel, bool(float8))
        if checkpoint:
            for name, block in model.layers.named_children():
                model.layers.register_module(name, checkpoint_wrapper(block, preserve_rng_state=False))
        if compiled:
            for block in model.layers.values():
                block.compile(fullgraph=True)
        if dp > 1:
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
            for block in model.layers.values():
                fully_shard(block, mesh=mesh["dp"], mp_policy=policy)
            fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
        model.to_empty(device="cuda")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=True)

    def step(self, batch):
        tokens, labels = (one.to(self.device) for one in batch)
        self.optimizer.zero_grad()
        if self.loss_parallel:
            with loss_parallel():
                pred = self.model(tokens)
                loss = F.cross_entropy(pred.flatten(0, 1), labels.flatten(0, 1))
                del pred
                loss.backward()
        else:
            pred = self.model(tokens)
            loss = F.cross_entropy(pred.flatten(0, 1), labels.flatten(0, 1))
            del pred
            loss.backward()
        self.optimizer.step()
        return loss.detach()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--gather-logits", action="store_true")
    parser.add_argument("--checkpoint", action="store_true")
    parser.add_argument("--mixed", action="store_true")
    parser.add_argument(
        "--float8", default="", help="linear, or gathered: FSDP gathers weights in float8 too"
    )
    parser.add_argument("--compiled", action="store_true")
    args = parser.parse_args()
    trainer = Trainer(
        args.tp, args.dp, args.gather_logits, args.checkpoint, args.mixed, args.float8, args.compiled
    )
    data = torch.zeros(args.steps, 2, args.batch_size, SEQ, dtype=torch.int64)
    for batch in data:
        trainer.step(list(batch))
    destroy_process_group()


if __name__ == "__main__":
    main()
