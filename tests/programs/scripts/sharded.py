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
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


def main(options: dict[str, Any]) -> None:
    """Train for three steps."""
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl")
    model = ddp(options, rank) if "ddp" in options else sharded(options)
    kind = torch.float16 if options.get("autocast") == "float16" else torch.bfloat16
    scaler = torch.amp.GradScaler("cuda", enabled=options.get("autocast") == "float16")
    optimizer = getattr(torch.optim, options.get("optimizer", "AdamW"))(
        groups_of_meshes(model), lr=1e-3, **options.get("optimizer_arguments", {})
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
            with torch.autocast("cuda", kind, enabled="autocast" in options):
                output, loss = forward(model, moved)
            if micro_batches > 1:
                loss = loss / micro_batches
            scaler.scale(loss).backward()
        if options.get("clip"):
            scaler.unscale_(optimizer)
            clip(model)
        scaler.step(optimizer)
        scaler.update()
    distributed.destroy_process_group()


def made_model(options: dict[str, Any]) -> Any:
    """Return the model in training mode, with adapters, frozen parameters and checkpoints where wanted."""
    source, _, name = options["model"].rpartition(":")
    if source == "torchvision":
        import torchvision

        model = torchvision.models.get_model(name, weights=None, **options.get("config", {})).train()
    else:
        import transformers

        kind = getattr(transformers, name)
        model = kind(kind.config_class(**options["config"])).train()
    if options.get("checkpoint"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for name, parameter in model.named_parameters():
        if any(name.startswith(prefix) for prefix in options.get("freeze", ())):
            parameter.requires_grad_(False)
    if "lora" in options:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(**options["lora"]))
    return model


def sharded(options: dict[str, Any]) -> Any:
    """Return the model sharded over all ranks."""
    world, replicas, split = distributed.get_world_size(), options.get("replicas", 1), options.get("tp", 1)
    mesh: Any = None
    if split > 1:
        split_mesh = init_device_mesh("cuda", (world // split, split), mesh_dim_names=("fsdp", "tp"))
        mesh = split_mesh["fsdp"]
    elif replicas == 1:
        mesh = init_device_mesh("cuda", (world,))
    else:
        mesh = init_device_mesh("cuda", (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))
    policy = {key: getattr(torch, value) for key, value in options.get("policy", {}).items()}
    given: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(**policy)}
    if options.get("offload"):
        given["offload_policy"] = CPUOffloadPolicy()
    if "reshard" in options:
        given["reshard_after_forward"] = options["reshard"]
    with torch.device("meta"):
        model = made_model(options)
    if split > 1:
        split_tensors(model, split_mesh["tp"])
    if world > split:
        if options.get("ends"):
            fully_shard(model.get_input_embeddings(), **given)
        for path in options["blocks"]:
            for block in model.get_submodule(path).children():
                fully_shard(block, **given)
        if options.get("ends"):
            fully_shard([model.model.norm, model.lm_head], **{**given, "reshard_after_forward": False})
        fully_shard(model, **given)
    is_tied = options.get("config", {}).get("tie_word_embeddings")
    if is_tied:
        model.lm_head.weight = None  # to_empty would part it from the embedding
    model.to_empty(device="cpu" if options.get("offload") else "cuda")
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to("cuda")
    if is_tied:
        model.tie_weights()
    for tensor in (*model.parameters(), *model.buffers()):
        nn.init.zeros_(tensor)
    return model


def split_tensors(model: Any, mesh: Any) -> None:
    """Split the model's tensors by the plan that it has in transformers."""
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    for name in model.all_tied_weights_keys:
        module, _, parameter = name.rpartition(".")
        tied = model.get_parameter(name)
        setattr(model.get_submodule(module), parameter, nn.Parameter(torch.empty_like(tied)))
    plan, *_ = model._resolve_parallel_plans(DistributedConfig(tp_size=mesh.size()))
    apply_tensor_parallelism(model, mesh, plan)
    model.tie_weights()


def groups_of_meshes(model: nn.Module) -> list[dict[str, Any]]:
    """Return a group of parameters for each mesh, since one kernel takes those of one."""
    groups: dict[Any, list[Tensor]] = {}
    for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [{"params": parameters} for parameters in groups.values()]


def clip(model: nn.Module) -> None:
    """Clip the norm of all gradients; those of several meshes have a norm each."""
    groups = [group["params"] for group in groups_of_meshes(model)]
    if len(groups) == 1:
        torch.nn.utils.clip_grad_norm_(groups[0], 1.0)
        return
    norms = [torch.nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]) for group in groups]
    whole = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(whole))
    for group in groups:
        torch.nn.utils.clip_grads_with_norm_(group, 1.0, total)


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
