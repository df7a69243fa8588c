"""Train on batches of the sizes that a file lists, and print what torch's allocator counted."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torchvision
import transformers

with Path(sys.argv[1]).open(encoding="utf-8") as file:
    WHAT = json.load(file)
TEXTS = {
    "gpt2": (transformers.GPT2LMHeadModel, transformers.GPT2Config),
    "bert": (transformers.BertForMaskedLM, transformers.BertConfig),
    "t5": (transformers.T5ForConditionalGeneration, transformers.T5Config),
}
TYPES = {"amp-bf16": torch.bfloat16, "amp-fp16": torch.float16}
OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


def build() -> torch.nn.Module:
    """Return the model."""
    if WHAT["model"] in TEXTS:
        kind, config = TEXTS[WHAT["model"]]
        return kind(config(**({"decoder_start_token_id": 0} if WHAT["model"] == "t5" else {})))
    model: torch.nn.Module = getattr(torchvision.models, WHAT["model"])()
    return model


def load(batch: int, size: list[int]) -> Any:
    """Return a batch: padded texts, or square images and their classes."""
    if WHAT["model"] not in TEXTS:
        images = torch.empty(batch, 3, *(size if len(size) > 1 else [*size, *size]))
        return images.cuda(), torch.zeros(batch, dtype=torch.int64).cuda()
    ids = torch.randint(0, 1000, (batch, *size))
    mask = torch.ones_like(ids)
    mask[0, -1] = 0
    return {"input_ids": ids.cuda(), "attention_mask": mask.cuda(), "labels": ids.cuda()}


def loss_of(model: torch.nn.Module, batch: Any) -> tuple[Any, torch.Tensor]:
    """Return the output of the model and its loss."""
    if WHAT["model"] in TEXTS:
        output = model(**batch)
        return output, output.loss
    output = model(batch[0])
    return output, torch.nn.functional.cross_entropy(output, batch[1])


def main() -> int:
    """Train; return the step that runs out of memory, 0 where none does."""
    if WHAT["cap_mib"]:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((WHAT["cap_mib"] * 2**20 + 0.5) / total)
    model = build().cuda().train()
    optimizer = OPTIMIZERS[WHAT["optimizer"]](model.parameters(), lr=0.001)
    kind = TYPES.get(WHAT["precision"])
    scaler = torch.amp.GradScaler("cuda", enabled=kind is torch.float16)
    batch = None
    for step, (samples, size) in enumerate(WHAT["batches"], 1):
        try:
            batch = None
            batch = load(samples, size)
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=kind) if kind else nullcontext():
                output, loss = loss_of(model, batch)  # noqa: F841  # lives until the next
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        except torch.OutOfMemoryError:
            return step
    return 0


died = main()
peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
retries = torch.cuda.memory_stats()["num_alloc_retries"]
print("PEAKS", *peaks, retries, died, file=sys.stderr, flush=True)
