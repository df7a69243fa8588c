"""Train a small Llama under FSDP2 in a group of one process, and save it in shards."""

import os
from tempfile import mkdtemp

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29532", RANK="0", WORLD_SIZE="1")
torch.manual_seed(0)
torch.cuda.set_device(0)
dist.init_process_group("nccl")
config = LlamaConfig(hidden_size=1024, intermediate_size=2816, num_hidden_layers=6, num_attention_heads=16)
model = LlamaForCausalLM(config).cuda()
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in model.model.layers:
    fully_shard(layer, mp_policy=policy)
fully_shard(model, mp_policy=policy)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(3):
    ids = torch.randint(0, 32000, (4, 512)).cuda()
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
states = get_state_dict(model, optimizer)
dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=mkdtemp())
dist.destroy_process_group()
