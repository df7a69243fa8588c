"""How long `planner max-batch` takes as a whole process, against the imports that it cannot do without.

    python benchmarks/startup.py [--runs 7]

Runs two processes in turn and prints the median of each and their ratio, which may be 1.6 at most:

- the floor: `import torch, torchvision.models`. Beside a CPU-only torch the registry's torchvision does not
  import unless two operators are declared first, so the floor then declares them;
- the planner: `planner max-batch --model resnet50 --gpu-mib 24000`.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

BAR = 1.6
ROOT = Path(__file__).parents[1]
PLAIN_FLOOR = "import torch, torchvision.models"
SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
FLOOR_WITH_SCHEMAS = (
    f"import torch; [torch.library.define('torchvision::' + name, '{SCHEMA}') for name in ('nms', 'qnms')]; "
    "import torchvision.models"
)
PLANNER = ("-m", "planner", "max-batch", "--model", "resnet50", "--gpu-mib", "24000")


def seconds(arguments: Sequence[str]) -> float:
    """Wall time of a Python process; its failure is an error."""
    start = perf_counter()
    subprocess.run([sys.executable, *arguments], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return perf_counter() - start


def floor_arguments() -> tuple[str, str]:
    """The plain import where it works here, else the one with the declarations."""
    plain = subprocess.run([sys.executable, "-c", PLAIN_FLOOR], cwd=ROOT, capture_output=True)
    return "-c", PLAIN_FLOOR if plain.returncode == 0 else FLOOR_WITH_SCHEMAS


def main() -> int:
    """Print both medians and their ratio; the exit code says whether the bar is kept."""
    parser = argparse.ArgumentParser(description="Start-up time of the planner against that of its imports.")
    parser.add_argument("--runs", type=int, default=7, help="runs of each process")
    runs = parser.parse_args().runs
    floor = floor_arguments()
    seconds(PLANNER)  # fills the caches of the file system and of compiled modules
    pairs = [(seconds(floor), seconds(PLANNER)) for _ in range(runs)]
    low, high = median(pair[0] for pair in pairs), median(pair[1] for pair in pairs)
    print(f"imports alone  {low:6.2f} s   {floor[1]}")
    print(f"planner        {high:6.2f} s   python {' '.join(PLANNER)}")
    print(f"ratio          {high / low:6.2f}     median of {runs} runs each, in turn; at most {BAR}")
    return 0 if high <= BAR * low else 1


if __name__ == "__main__":
    sys.exit(main())
