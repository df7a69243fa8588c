"""How long `planner max-batch` takes as a whole process, against the imports that it cannot do without.

    python -m benchmarks.speed.startup [--runs 7]

Runs four processes in turn and prints the median of each:

- `import torch, torchvision.models`, and a plan traced anew, which may take 1.4 times as long. Beside a
  CPU-only torch the registry's torchvision does not import unless two operators are declared first, so the
  imports then declare them;
- `import numpy, yaml`, and a plan from the traces that ship, which may take 5 times as long, and 0.35 s.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

COLD_BAR, KEPT_BAR, KEPT_SECONDS = 1.4, 5.0, 0.35
ROOT = Path(__file__).parents[2]
PLAIN_FLOOR = "import torch, torchvision.models"
SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
FLOOR_WITH_SCHEMAS = (
    f"import torch; [torch.library.define('torchvision::' + name, '{SCHEMA}') for name in ('nms', 'qnms')]; "
    "import torchvision.models"
)
SMALL_FLOOR = ("-c", "import numpy, yaml")
KEPT = ("-m", "planner", "max-batch", "--model", "vit_b_16", "--gpu-mib", "24000")
COLD = ("-m", "planner", "max-batch", "--model", "resnet50", "--gpu-mib", "24000", "--no-cache")


def seconds(arguments: Sequence[str]) -> float:
    """Wall time of a Python process with an empty cache; its failure is an error."""
    with tempfile.TemporaryDirectory() as cache:
        start = perf_counter()
        environment = os.environ | {"XDG_CACHE_HOME": cache}
        command = [sys.executable, *arguments]
        subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
        return perf_counter() - start


def floor_arguments() -> tuple[str, str]:
    """The plain import where it works here, else the one with the declarations."""
    plain = subprocess.run([sys.executable, "-c", PLAIN_FLOOR], cwd=ROOT, capture_output=True)
    return "-c", PLAIN_FLOOR if plain.returncode == 0 else FLOOR_WITH_SCHEMAS


def main() -> int:
    """Print the medians and their ratios; the exit code says whether the bars are kept."""
    parser = argparse.ArgumentParser(description="Start-up time of the planner against that of its imports.")
    parser.add_argument("--runs", type=int, default=7, help="runs of each process")
    runs = parser.parse_args().runs
    processes = (floor_arguments(), COLD, SMALL_FLOOR, KEPT)
    for arguments in processes:
        seconds(arguments)  # fills the caches of the file system and of compiled modules
    found = [[seconds(arguments) for arguments in processes] for _ in range(runs)]
    floor, cold, small, kept = (median(column) for column in zip(*found, strict=True))
    for taken, arguments in zip((floor, cold, small, kept), processes, strict=True):
        print(f"{taken:6.2f} s   python {' '.join(arguments)[:90]}")
    print(f"traced anew    {cold / floor:5.2f} times its imports, at most {COLD_BAR}")
    bars = f"at most {KEPT_BAR:.0f}; at most {KEPT_SECONDS} s"
    print(f"shipped traces {kept / small:5.2f} times its imports, {bars}")
    print(f"medians of {runs} runs each, in turn")
    return 0 if cold <= COLD_BAR * floor and kept <= min(KEPT_BAR * small, KEPT_SECONDS) else 1


if __name__ == "__main__":
    sys.exit(main())
