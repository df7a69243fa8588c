"""Hold `planner run` against plain Python in alternating pairs, as ratios and differences of one run.

    python -m benchmarks.emulated.start PYTHON [--pairs N] [--gpu NAME]

PYTHON has the CUDA build of torch, and torchvision. Both limits are of the design: the start of `planner run`
takes less than a second more than plain Python, and the whole process for ResNet-50 at most three times the
import of torch.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import NamedTuple

IMPORT = "import torch; torch.ones(1)"
TENSOR = "import torch; torch.ones(1, device='cuda')"
RESNET = """
import torch, torchvision
model = torchvision.models.resnet50(num_classes=10).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    images, targets = torch.empty(128, 3, 224, 224).cuda(), torch.empty(128, 10).cuda()
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(images), targets).backward()
    optimizer.step()
"""


class Seconds(NamedTuple):
    """Seconds that a command took."""

    wall: float
    processor: float  # of all its processes


def measure(command: Sequence[str]) -> Seconds:
    """Run a command and return its seconds."""
    before, start = os.times(), perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    wall, after = perf_counter() - start, os.times()
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return Seconds(wall, used)


def main() -> None:
    """Print the medians over pairs of runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("python")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--gpu", default="RTX 3090")
    options = parser.parse_args()
    emulated = [sys.executable, "-m", "planner", "run", "--gpu", options.gpu, "--", options.python, "-c"]
    measure([*emulated, TENSOR])  # compiles the libraries where they are not yet
    rows = []
    for _ in range(options.pairs):
        plain = measure([options.python, "-c", IMPORT])
        rows.append((plain, measure([*emulated, TENSOR]), measure([*emulated, RESNET])))
    for name, column in (("wall", 0), ("processor", 1)):
        more = median(tensor[column] - plain[column] for plain, tensor, _ in rows)
        times = median(resnet[column] / plain[column] for plain, _, resnet in rows)
        plain_s = median(plain[column] for plain, _, _ in rows)
        print(
            f"{name}: import of torch {plain_s:.2f} s; planner run with one tensor {more:+.2f} s; "
            f"ResNet-50, batch 128, three steps: {times:.2f} x the import"
        )


if __name__ == "__main__":
    main()
