"""Hold the profile run of `planner serve` against plain torch on emulated GPUs.

    python -m benchmarks.emulated.serving --python PYTHON

`serving_profile.py` runs a decoder's layers and the sampler of the shapes below, in tensors that live as
those of vLLM's layers do. So it shows that the sums of `planner.planning.serving` are what PyTorch's
allocator holds for such tensors; that vLLM's own operators keep no others is read from its sources, not run.
Rows are written to `serving.csv`.
"""

import argparse
import csv
import json
import subprocess
import sys
from pathlib import Path

from benchmarks.emulated.probe_client import ROOT
from planner.capture.models.transformers.serving import ServedModel
from planner.hardware.database import find_device
from planner.planning.serving import ServingSettings, activation_bytes, sampler_bytes
from planner.program import workspace_bytes

ROWS = Path(__file__).with_name("serving.csv")
# Hidden width, queries, keys and values, MLP, vocabulary; tokens of a step, sequences; GPU.
SHAPES: tuple[tuple[tuple[int, int, int, int, int], int, int, str], ...] = (
    ((4096, 4096, 2048, 14336, 128256), 2048, 256, "A100 80GB"),
    ((4096, 4096, 2048, 14336, 128256), 8192, 1024, "H100 80GB"),
    ((2048, 2048, 1024, 8192, 128256), 2048, 256, "L4"),
    ((3584, 3584, 1024, 18944, 152064), 2048, 256, "RTX 4090"),
    ((1024, 2048, 2048, 3072, 151936), 2048, 128, "T4"),
    ((5120, 5120, 10240, 13824, 32000), 4096, 256, "A100 40GB"),
    ((2304, 2048, 2048, 9216, 256000), 2048, 64, "RTX 3090"),
    ((4096, 4096, 8192, 11008, 32000), 16384, 1024, "H200"),
    ((768, 768, 1536, 3072, 50257), 2048, 256, "RTX 3060"),
    ((8192, 8192, 2048, 28672, 128256), 8192, 1024, "B200"),
)
FIELDS = ("gpu", "shape", "tokens", "sequences", "layers", "sampler", "emulated_layers", "emulated_sampler")


def main() -> None:
    """Run all shapes and write their rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", required=True, help="a Python with the CUDA build of torch")
    options = parser.parse_args()
    with ROWS.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(FIELDS)
        for shape, tokens, sequences, gpu in SHAPES:
            emulated = run(options.python, shape, tokens, sequences, gpu)
            own = compute(shape, tokens, sequences, gpu)
            row = [gpu, "x".join(map(str, shape)), tokens, sequences, *own]
            writer.writerow([*row, emulated["layers"], emulated["sampler"]])
            print(row, emulated, flush=True)


def compute(shape: tuple[int, ...], tokens: int, sequences: int, gpu: str) -> tuple[int, int]:
    """Return the planned peaks of the layers and of the sampler, with cuBLAS's workspace."""
    hidden, queries, keys, intermediate, vocabulary = shape
    model = ServedModel("shape", 0, 2, 2, keys, hidden, queries, keys, intermediate, vocabulary, 0)
    settings = ServingSettings(max_num_batched_tokens=tokens, max_num_seqs=sequences)
    workspace = workspace_bytes(find_device(gpu).capability)
    return activation_bytes(model, tokens) + workspace, sampler_bytes(model, settings) + workspace


def run(python: str, shape: tuple[int, ...], tokens: int, sequences: int, gpu: str) -> dict[str, int]:
    """Return the emulated peaks of both."""
    names = ("hidden", "queries", "keys", "intermediate", "vocabulary")
    given = json.dumps({**dict(zip(names, shape, strict=True)), "layers": 2})
    script = str(Path(__file__).with_name("serving_profile.py"))
    command = [sys.executable, "-m", "planner", "run", "--gpu", gpu, "--", python, script]
    command += ["--shape", given, "--tokens", str(tokens), "--rows", str(sequences)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    line = next(line for line in (done.stdout + done.stderr).splitlines() if line.startswith('{"layers"'))
    peaks: dict[str, int] = json.loads(line)
    return peaks


if __name__ == "__main__":
    sys.exit(main())
