"""Train one rank of several by accelerate's plugin for FSDP2, as its guides show it.

torchrun --nproc-per-node 2 accelerate_fsdp.py '{"model": "LlamaForCausalLM", "config": {...},
    "shape": [4, 128], "precision": "bf16", "plugin": {"reshard_after_forward": true}}'
"""

import json
import sys
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from sharded import batch


def main(options: dict[str, Any]) -> None:
    """Train for three steps."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **options["plugin"])
    accelerator = Accelerator(
        mixed_precision=options["precision"],
        fsdp_plugin=plugin,
        gradient_accumulation_steps=options["accumulate"],
    )
    kind = getattr(transformers, options["model"])
    model = kind(kind.config_class(**options["config"])).train()
    if options["checkpoint"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = getattr(torch.optim, options["optimizer"])(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    made = batch(options)
    moved: dict[str, torch.Tensor] = {}
    for _ in range(3 * options["accumulate"]):
        moved.clear()
        moved.update({name: tensor.to(accelerator.device) for name, tensor in made.items()})
        with accelerator.accumulate(model):
            output = model(**moved)
            loss = output.loss
            accelerator.backward(loss)
            if options["clip"] and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.end_training()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
