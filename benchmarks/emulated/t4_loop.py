"""Train one model as the T4 rows of benchmarks/published were trained, and return its peaks.

Run by `t4.py` on an emulated T4. The loop is described in benchmarks/published/README.md:
AdamW, one batch made once, autocast to bfloat16, one step to warm up, then one step that is read.
"""

from collections.abc import Callable

import torch
import torchvision
import transformers
from cases import Case, run_cases

Forward = Callable[[], tuple[object, torch.Tensor]]


def _build(name: str, batch: int, size: int) -> tuple[torch.nn.Module, Forward]:
    """Return the model, and a forward pass that returns the output and the loss: a step holds both."""
    if name == "resnet50":
        model = torchvision.models.resnet50().cuda()
        images = torch.randn(batch, 3, size, size, device="cuda")
        labels = torch.randint(0, 1000, (batch,), device="cuda")

        def classify() -> tuple[object, torch.Tensor]:
            output = model(images)
            return output, torch.nn.functional.cross_entropy(output, labels)

        return model, classify
    ids = torch.randint(0, 1000, (batch, size), device="cuda")
    if name == "gpt2":
        gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config()).cuda()

        def predict() -> tuple[object, torch.Tensor]:
            output = gpt2(input_ids=ids, labels=ids)
            return output, output.loss

        return gpt2, predict
    kinds = {
        "bert-base-uncased": (transformers.BertModel, transformers.BertConfig),
        "distilbert-base-uncased": (transformers.DistilBertModel, transformers.DistilBertConfig),
    }
    kind, config = kinds[name]
    encoder = kind(config()).cuda()

    def encode() -> tuple[object, torch.Tensor]:
        output = encoder(input_ids=ids)
        return output, output.last_hidden_state.float().pow(2).mean()

    return encoder, encode


def run(case: Case) -> Case:
    """Run the loop."""
    model, forward = _build(case["model"], case["batch"], case["size"])
    model.train()
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            output, loss = forward()
        loss.backward()
        optimizer.step()
        del output

    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}


if __name__ == "__main__":
    run_cases(run)
