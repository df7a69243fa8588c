"""Measure a loss over pairs of texts as Liger's script does, speed of all sizes first, and what stays.

    planner run --gpu "A100 80GB" -- PYTHON benchmarks/accuracy/preference_process.py orpo 1024

PYTHON has torch 2.5.1 and the Liger of the row (0.4.2 for ORPO, 0.5.0 for CPO and SimPO), whose chunks are
compiled. `held` is memory allocated between runs: torch.compile leaves a cycle of references to the weights
and inputs of a run, until Python collects it.
"""

import argparse
import importlib

import torch
from torch import Tensor, nn

VOCABULARY, HIDDEN, MIB = 128_256, 4096, 2**20
SIZES = (2, 4, 8, 16)


class Loss(nn.Module):
    """A head and the loss of its logits."""

    def __init__(self, name: str) -> None:
        super().__init__()
        head = nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=torch.bfloat16, device="meta")
        self.head = head.to_empty(device="cuda")
        module = importlib.import_module(f"liger_kernel.chunked_loss.{name}_loss")
        kind = {"orpo": "ORPO", "cpo": "CPO", "simpo": "SimPO"}[name]
        self.function = getattr(module, f"LigerFusedLinear{kind}Function").apply

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        result = self.function(x, self.head.weight, target)
        return result[0] if isinstance(result, tuple) else result


def measure(name: str, batch: int, length: int, is_full: bool, passes: int) -> float:
    """Return the peak of the last pass, MiB."""
    twin, loss = Loss(name), Loss(name)
    x = torch.randn(batch, length, HIDDEN, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    target = torch.randint(VOCABULARY, (batch, length), device="cuda")
    for _ in range(passes):
        torch.cuda.reset_peak_memory_stats()
        y = loss(x, target)
        if is_full:
            y.backward()
        del y
    del twin
    return torch.cuda.max_memory_allocated() / MIB


def plain(batch: int, length: int) -> None:
    """Make a plain pass, of which cuBLAS's workspaces stay."""
    head = torch.empty(VOCABULARY, HIDDEN, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    x = torch.randn(batch, length, HIDDEN, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    (x @ head.t()).float().logsumexp(-1).mean().backward()


def main() -> None:
    """Print the peaks of all sizes, and what is held between them."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("loss", choices=("orpo", "cpo", "simpo"))
    parser.add_argument("length", type=int)
    options = parser.parse_args()
    for is_full in (False, True):
        for batch in SIZES:
            measure(options.loss, batch, options.length, is_full, 4)
            print(f"batch {batch}: held {torch.cuda.memory_allocated() / MIB:.3f} MiB", flush=True)
        plain(2, 256)
    for batch in SIZES:
        peak = measure(options.loss, batch, options.length, True, 10)
        print(f"batch {batch}: peak {peak:.3f} MiB", flush=True)


if __name__ == "__main__":
    main()
