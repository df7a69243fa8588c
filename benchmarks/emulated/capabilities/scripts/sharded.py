"""Train one rank of several as guides of PyTorch show it: DistributedDataParallel, or FSDP2 block by block.

    torchrun --nproc-per-node 2 sharded.py '{"model": "LlamaForCausalLM", "config": {...},
        "blocks": ["model.layers"], "shape": [4, 128], "policy": {"param_dtype": "bfloat16"}}'

The model is one of transformers, or `torchvision:NAME`; it is made on meta, sharded, then allocated. With
`"ddp"`, a dictionary of DistributedDataParallel's keywords, it is made on the CPU and moved.
"""

import json
import os
import sys
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


def main(options: dict[str, Any]) -> None:
    """Train for three steps."""
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl")
    model = ddp(options, rank) if "ddp" in options else sharded(options)
    optimizer = getattr(torch.optim, options.get("optimizer", "AdamW"))(
        model.parameters(), lr=1e-3, **options.get("optimizer_arguments", {})
    )
    micro_batches = options.get("accumulate", 1)
    made = batch(options)
    moved: dict[str, Tensor] = {}
    for _ in range(3):
        for number in range(micro_batches):
            moved.clear()
            moved.update({name: tensor.to("cuda") for name, tensor in made.items()})
            if number == 0:
                optimizer.zero_grad()
            output, loss = forward(model, moved)
            if micro_batches > 1:
                loss = loss / micro_batches
            loss.backward()
        if options.get("clip"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    distributed.destroy_process_group()


def made_model(options: dict[str, Any]) -> Any:
    """Return the model in training mode, with checkpoints where they are wanted."""
    source, _, name = options["model"].rpartition(":")
    if source == "torchvision":
        import torchvision

        return torchvision.models.get_model(name, weights=None, **options.get("config", {})).train()
    import transformers

    kind = getattr(transformers, name)
    model = kind(kind.config_class(**options["config"])).train()
    if options.get("checkpoint"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def sharded(options: dict[str, Any]) -> nn.Module:
    """Return the model sharded over all ranks."""
    world, replicas = distributed.get_world_size(), options.get("replicas", 1)
    if replicas == 1:
        mesh = init_device_mesh("cuda", (world,))
    else:
        mesh = init_device_mesh("cuda", (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))
    policy = {key: getattr(torch, value) for key, value in options.get("policy", {}).items()}
    given: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(**policy)}
    if "reshard" in options:
        given["reshard_after_forward"] = options["reshard"]
    with torch.device("meta"):
        model = made_model(options)
    for path in options["blocks"]:
        for block in model.get_submodule(path).children():
            fully_shard(block, **given)
    fully_shard(model, **given)
    model.to_empty(device="cuda")
    for tensor in (*model.parameters(), *model.buffers()):
        nn.init.zeros_(tensor)
    return model


def ddp(options: dict[str, Any], rank: int) -> nn.Module:
    """Return the model under DistributedDataParallel."""
    return DistributedDataParallel(made_model(options).cuda(), device_ids=[rank], **options["ddp"])


def batch(options: dict[str, Any]) -> dict[str, Tensor]:
    """Return a batch on the CPU."""
    shape = options["shape"]
    if len(shape) == 4:
        return {"images": torch.zeros(shape), "labels": torch.zeros(shape[0], dtype=torch.int64)}
    ids, mask = torch.zeros(shape, dtype=torch.int64), torch.ones(shape, dtype=torch.int64)
    mask[0, -1] = 0
    labels = torch.zeros(shape[0], dtype=torch.int64) if options.get("classes") else ids
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def forward(model: nn.Module, moved: dict[str, Tensor]) -> tuple[Any, Tensor]:
    """Return the output of the model and its loss."""
    if "images" in moved:
        output = model(moved["images"])
        return output, F.cross_entropy(output, moved["labels"])
    output = model(**moved)
    return output, output.loss


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
