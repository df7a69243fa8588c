"""Plan 10,000 cells on a local Dask cluster of four workers, one of which is killed on the way.

    python -m benchmarks.speed.dask_sweep [--jobs N]

Starts a scheduler and four workers with one thread each, runs `planner sweep --engine dask`, kills a worker
(SIGKILL) once a tenth of the jobs have results, and checks that each cell is there once and none failed.
Prints one line of figures, which docs/sweep.md quotes. Nothing runs on a GPU: each cell is computed.
"""

import os
import signal
import subprocess
import sys
from argparse import ArgumentParser
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, sleep

import yaml

from benchmarks.rows import read_lines
from planner.hardware import load_devices

WORKERS = 4
MODELS = (
    "alexnet", "vgg11", "resnet18", "resnet34", "squeezenet1_1", "mobilenet_v2", "mobilenet_v3_small",
    "mnasnet0_5", "shufflenet_v2_x0_5", "regnet_y_400mf",
)  # fmt: skip
OPTIMIZERS = ("sgd", "adam", "adamw")
PRECISIONS = ("fp32", "amp-fp16", "amp-bf16")
RECIPES = {
    f"{optimizer} {precision}": {"optimizer": optimizer, "precision": precision}
    for optimizer in OPTIMIZERS
    for precision in PRECISIONS
} | {"last": {"memory_format": "channels_last"}, "average": {"ema": True}}


def write_grid(path: Path, jobs: int) -> int:
    """Write a grid of at most so many jobs on all GPUs, and return its number of cells."""
    models = [f"torchvision:{name}" for name in MODELS[: -(-jobs // len(RECIPES))]]
    path.write_text(
        yaml.safe_dump({"about": "many cells", "models": models, "recipes": RECIPES, "gpus": "all"})
    )
    return len(models) * len(RECIPES) * len(load_devices())


def start(*arguments: str, log: Path) -> subprocess.Popen[bytes]:
    """Start a part of the cluster."""
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "distributed.cli." + arguments[0], *arguments[1:]],
            stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip


def run(folder: Path, jobs: int) -> str:
    """Return a line on the sweep. Raises AssertionError where a cell is lost."""
    cells = write_grid(folder / "grid.yaml", jobs)
    address_file = folder / "scheduler.json"
    parts = [
        start(
            "dask_scheduler", "--port", "0", "--no-dashboard", "--scheduler-file", str(address_file),
            log=folder / "scheduler.log",
        )
    ]  # fmt: skip
    try:
        while not address_file.exists():
            sleep(0.1)
        for number in range(WORKERS):
            options = ("--nthreads", "1", "--no-nanny", "--no-dashboard", "--memory-limit", "0")
            file = ("--scheduler-file", str(address_file), "--local-directory", str(folder))
            parts.append(start("dask_worker", *options, *file, log=folder / f"worker{number}.log"))
        address = yaml.safe_load(address_file.read_text())["address"]
        begin = perf_counter()
        command = [
            Path(sys.executable).with_name("planner"), "sweep", folder / "grid.yaml", "--engine", "dask",
            "--scheduler", address, "--csv", folder / "cells.csv",
        ]  # fmt: skip
        environment = os.environ | {"PLANNER_CACHE_DIR": str(folder / "cache")}
        with (folder / "sweep.log").open("wb") as output:
            sweep = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        results = folder / "grid.results"
        while sweep.poll() is None and len(list(results.glob("*"))) < jobs // 10:
            sleep(0.2)
        parts[1].send_signal(signal.SIGKILL)
        killed_at = len(list(results.glob("*")))
        code = sweep.wait()
        seconds = perf_counter() - begin
    finally:
        for part in parts:
            part.kill()
            part.wait()
    rows = read_lines(folder / "cells.csv")
    counts = Counter((row["model"], row["recipe"], row["gpu"]) for row in rows)
    assert code == 0, (folder / "sweep.log").read_text()[-2000:]
    assert len(counts) == cells and set(counts.values()) == {1}
    assert all(row["max_batch"] for row in rows)
    done = len(list(results.glob("*")))
    return f"{cells:,} cells of {done} jobs, a worker killed after {killed_at}: all there in {seconds:.0f} s"


def main() -> None:
    """Run the sweep."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=len(MODELS) * len(RECIPES))
    with TemporaryDirectory() as folder:
        print(run(Path(folder), parser.parse_args().jobs))


if __name__ == "__main__":
    main()
