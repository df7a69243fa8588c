"""Time `planner max-batch` as a whole process against the imports that it cannot do without.

    python -m benchmarks.speed.startup [--runs 7]

Runs four processes in turn and prints the median of each:

- `import torch, torchvision.models`, and a plan traced anew, which may take 1.4 times as long. Beside a
  CPU-only torch the registry's torchvision does not import unless two operators are declared first, so the
  imports then declare them;
- `import numpy, yaml`, and a plan from bundled traces, which may take 5 times as long, and 0.35 s.
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

COLD_BAR, CACHED_BAR, CACHED_SECONDS = 1.4, 5.0, 0.35
ROOT = Path(__file__).parents[2]
PLAIN_FLOOR = "import torch, torchvision.models"
SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
FLOOR_WITH_SCHEMAS = (
    f"import torch; [torch.library.define('torchvision::' + name, '{SCHEMA}') for name in ('nms', 'qnms')]; "
    "import torchvision.models"
)
SMALL_FLOOR = ("-c", "import numpy, yaml")
CACHED = ("-m", "planner", "max-batch", "--model", "vit_b_16", "--gpu-mib", "24000")
COLD = ("-m", "planner", "max-batch", "--model", "resnet50", "--gpu-mib", "24000", "--no-cache")


def seconds(arguments: Sequence[str]) -> float:
    """Return the wall time of a Python process with an empty cache; its failure is an error."""
    with tempfile.TemporaryDirectory() as cache:
        start = perf_counter()
        environment = os.environ | {"XDG_CACHE_HOME": cache}
        command = [sys.executable, *arguments]
        subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
        return perf_counter() - start


def floor_arguments() -> tuple[str, str]:
    """Return the plain import if it works here, else the one with the declarations."""
    plain = subprocess.run([sys.executable, "-c", PLAIN_FLOOR], cwd=ROOT, capture_output=True)
    return "-c", PLAIN_FLOOR if plain.returncode == 0 else FLOOR_WITH_SCHEMAS


def main() -> int:
    """Print the medians and their ratios; the exit code is 0 if the bars hold."""
    parser = argparse.ArgumentParser(description="Start-up time of the planner against that of its imports.")
    parser.add_argument("--runs", type=int, default=7, help="runs of each process")
    runs = parser.parse_args().runs
    processes = (floor_arguments(), COLD, SMALL_FLOOR, CACHED)
    for arguments in processes:
        seconds(arguments)  # fills the caches of the file system and of compiled modules
    times = [[seconds(arguments) for arguments in processes] for _ in range(runs)]
    floor, cold, small, cached = (median(column) for column in zip(*times, strict=True))
    for elapsed, arguments in zip((floor, cold, small, cached), processes, strict=True):
        print(f"{elapsed:6.2f} s   python {' '.join(arguments)[:90]}")
    print(f"traced anew    {cold / floor:5.2f} times its imports, at most {COLD_BAR}")
    bars = f"at most {CACHED_BAR:.0f}; at most {CACHED_SECONDS} s"
    print(f"bundled traces {cached / small:5.2f} times its imports, {bars}")
    print(f"medians of {runs} runs each, in turn")
    return 0 if cold <= COLD_BAR * floor and cached <= min(CACHED_BAR * small, CACHED_SECONDS) else 1


if __name__ == "__main__":
    sys.exit(main())
