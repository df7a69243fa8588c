"""Compare compiled plans with what torch.compile itself takes, in seconds of the processor.

    python -m benchmarks.speed.compiled --python PYTHON [MODEL ...]

PYTHON has the CUDA build of torch, Triton and torchvision. Each model is planned by `planner estimate
--compile` without a cache, and beside it two steps of it run on an emulated GPU under torch.compile, whose
caches are empty and which compiles in its own process. Both figures are of whole processes with imports,
user and system time with all children, so that other work on the machine changes them less than wall time.
Prints a Markdown table.
"""

import argparse
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
MODELS = ("resnet18", "mobilenet_v3_small", "squeezenet1_1", "alexnet")  # of torchvision
BATCH, GPU = 16, "RTX 3090"
_STEPS = """
import sys, torch, torchvision
model = torchvision.models.get_model(sys.argv[1]).cuda()
compiled, optimizer = torch.compile(model), torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    images, labels = torch.randn({batch}, 3, 224, 224).cuda(), torch.zeros({batch}, dtype=torch.long).cuda()
    torch.nn.functional.cross_entropy(compiled(images), labels).backward()
    optimizer.step()
"""


def main() -> None:
    """Print a row for each model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=MODELS, metavar="MODEL")
    parser.add_argument("--python", required=True)
    options = parser.parse_args()
    print("| model | torch.compile, s | plan, s | plan by torch.compile |\n|---|--:|--:|--:|")
    for model in options.models:
        running, planning = torch_seconds(model, options.python), plan_seconds(model)
        print(f"| {model} | {running:.0f} | {planning:.0f} | {planning / running:.2f} |", flush=True)


def plan_seconds(model: str) -> float:
    """Return the seconds of a plan."""
    command = [sys.executable, "-m", "planner", "estimate", "--model", f"torchvision:{model}", "--compile"]
    return _seconds([*command, "--batch", str(BATCH), "--gpu", GPU, "--no-cache"])


def torch_seconds(model: str, python: str) -> float:
    """Return the seconds of two compiled steps on an emulated GPU."""
    with TemporaryDirectory() as folder:
        caches = {name: f"{folder}/{name}" for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
        command = [sys.executable, "-m", "planner", "run", "--gpu", GPU, "--", python, "-c"]
        script = _STEPS.format(batch=BATCH)
        return _seconds([*command, script, model], **caches, TORCHINDUCTOR_COMPILE_THREADS="1")


def _seconds(command: Sequence[str], **environment: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        command, check=True, cwd=ROOT, env={**os.environ, **environment},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    sys.exit(main())
