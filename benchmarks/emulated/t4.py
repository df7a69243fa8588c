"""Hold emulated T4s against the eight published runs on a real one, and print a table for docs/emulator.md.

    python -m benchmarks.emulated.t4 PYTHON [PYTHON ...]

Each PYTHON has the CUDA build of torch, torchvision and transformers. PLANNER_EMULATED_ADDRESSES=rising is
passed on.
"""

import csv
import sys
from pathlib import Path
from statistics import median

from benchmarks.emulated.emulate import emulate

PUBLISHED = Path(__file__).parents[1] / "published" / "t4_torch211.csv"
COUNTERS = ("allocated", "reserved")


def main() -> None:
    """Print emulated over measured, allocated and reserved, row by row."""
    with PUBLISHED.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    cases = [
        {"model": row["model"], "batch": int(row["batch"]), "size": int(row["length_or_size"])}
        for row in rows
    ]
    runs = [emulate(python, "T4", "t4_loop.py", cases) for python in sys.argv[1:]]

    def errors(figures: dict[str, int], row: dict[str, str]) -> list[float]:
        return [figures[name] / int(row[f"peak_{name}_bytes"]) - 1 for name in COUNTERS]

    for number, row in enumerate(rows):
        cells = [", ".join(f"{error:+.2%}" for error in errors(run[number], row)) for run in runs]
        print(f"| {row['model']}, {row['batch']} x {row['length_or_size']} | {' | '.join(cells)} |")
    for index, name in enumerate(COUNTERS):
        pairs = [pair for run in runs for pair in zip(run, rows, strict=True)]
        sizes = [abs(errors(figures, row)[index]) for figures, row in pairs]
        print(f"{name}: median {median(sizes):.2%}, worst {max(sizes):.2%} over {len(sizes)} runs")


if __name__ == "__main__":
    main()
