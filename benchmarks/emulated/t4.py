"""Hold emulated T4s against the eight published runs on a real one, and print a table for docs/emulator.md.

    python benchmarks/emulated/t4.py PYTHON [PYTHON ...]

Each PYTHON has the CUDA build of torch, torchvision and transformers. PLANNER_EMULATED_ADDRESSES=rising is
passed on.
"""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

LOOP = Path(__file__).with_name("t4_loop.py")
PUBLISHED = Path(__file__).parents[1] / "published" / "t4_torch211.csv"


def emulate(python: str, row: dict[str, str]) -> dict[str, int]:
    """Run the loop of one row and return what it prints."""
    command = [python, str(LOOP), row["model"], row["batch"], row["length_or_size"]]
    planner = [sys.executable, "-m", "planner", "run", "--gpu", "T4", "--json", "--", *command]
    done = subprocess.run(planner, env=os.environ, capture_output=True, text=True, check=True)
    printed = next(line for line in done.stderr.splitlines() if line.startswith("{"))
    found: dict[str, int] = json.loads(printed)
    return found


def main() -> None:
    """Print emulated over measured, allocated and reserved, row by row."""
    errors: dict[str, list[float]] = {"allocated": [], "reserved": []}
    with PUBLISHED.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        cells = []
        for python in sys.argv[1:]:
            found = emulate(python, row)
            for name, figures in errors.items():
                figures.append(found[name] / int(row[f"peak_{name}_bytes"]) - 1)
            cells.append(", ".join(f"{figures[-1]:+.2%}" for figures in errors.values()))
        name = f"{row['model']}, {row['batch']} x {row['length_or_size']}"
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
    for name, figures in errors.items():
        sizes = [abs(error) for error in figures]
        print(f"{name}: median {median(sizes):.2%}, worst {max(sizes):.2%} over {len(sizes)} runs")


if __name__ == "__main__":
    main()
