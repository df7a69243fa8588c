"""Train one rank of several with DeepSpeed's ZeRO, as its getting-started page shows it.

    torchrun --nproc-per-node 2 zero.py '{"model": "LlamaForCausalLM", "config": {...}, "shape": [4, 128],
        "deepspeed": {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}, ...}}'

The model is one of transformers, or `torchvision:NAME`; it is made on the CPU. The optimizer is torch's.
"""

import json
import os
import sys
import tempfile
from contextlib import suppress
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator
from sharded import batch, forward, made_model


def main(options: dict[str, Any]) -> None:
    """Train for three steps."""
    same = coordinator.assert_ints_same_as_other_ranks

    def compare(ints: list[int]) -> None:
        with suppress(RuntimeError):  # nothing is sent between emulated GPUs; the first rank compares itself
            same(ints)

    coordinator.assert_ints_same_as_other_ranks = compare
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed()
    model = made_model(options)
    optimizer = None
    if "optimizer" in options:
        kind = getattr(torch.optim, options["optimizer"])
        optimizer = kind(model.parameters(), lr=1e-3, **options.get("optimizer_arguments", {}))
    config = options["deepspeed"]
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), optimizer=optimizer, config=config
    )
    made = batch(options)
    moved: dict[str, torch.Tensor] = {}
    evaluated: dict[str, torch.Tensor] = {}
    answer = error = None
    for step in range(3):
        if step == 2 and options.get("evaluate"):
            engine.eval()
            with torch.no_grad():
                for _ in range(2):
                    load(made, evaluated)
                    answer, error = forward(engine, evaluated)
            engine.train()
        if step == 2 and engine.zero_optimization_stage() == 3:
            engine.save_16bit_model(tempfile.mkdtemp())  # if the configuration gathers its weights
        for _ in range(config.get("gradient_accumulation_steps", 1)):
            load(made, moved)
            output, loss = forward(engine, moved)
            engine.backward(loss)
            engine.step()
    del output, loss, answer, error
    torch.distributed.destroy_process_group()


def load(made: dict[str, torch.Tensor], moved: dict[str, torch.Tensor]) -> None:
    """Replace the tensors in `moved` by copies of a batch on the GPU."""
    moved.clear()
    moved.update({name: tensor.to("cuda") for name, tensor in made.items()})


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
