"""Hold emulated T4s and the static planner against the eight published runs on a real one.

    python -m benchmarks.emulated.t4 PYTHON [PYTHON ...]

Each PYTHON has the CUDA build of torch, torchvision and transformers; the static planner queries the cuDNN of
the first. Prints the rows of a table for docs/emulator.md. PLANNER_EMULATED_ADDRESSES=rising is passed on.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.emulated.both_sides import cudnn_of
from benchmarks.emulated.emulate import Case, emulate
from benchmarks.emulated.t4_static import plan
from benchmarks.rows import read_lines

PUBLISHED = Path(__file__).parents[1] / "published" / "t4_torch211.csv"
COUNTERS = ("allocated", "reserved", "process")
# Of free blocks of equal size, 2.11 takes the newest segment's where addresses of new ones fall, and the
# oldest segment's where they rise, as 2.13 does.
ORDERS = ("2.11", "2.13")

Row = Mapping[str, str]


def main() -> None:
    """Print errors over the measured figures, row by row: static in both orders, then each emulated one."""
    rows = read_lines(PUBLISHED)
    cases: list[Case] = [
        {"model": row["model"], "batch": int(row["batch"]), "size": int(row["length_or_size"])}
        for row in rows
    ]
    cudnn = cudnn_of(sys.argv[1])
    runs = [[plan(case, cudnn, version) for case in cases] for version in ORDERS]
    runs += [emulate(python, "T4", "t4_loop.py", cases) for python in sys.argv[1:]]
    for number, row in enumerate(rows):
        cells = [", ".join(f"{error:+.2%}" for error in _errors(run[number], row)) for run in runs]
        print(f"| {row['model']}, {row['batch']} x {row['length_or_size']} | {' | '.join(cells)} |")
    print(f"| median, absolute | {' | '.join(_medians(run, rows) for run in runs)} |")


def _medians(run: Sequence[Case], rows: Sequence[Row]) -> str:
    columns = zip(*(_errors(figures, row) for figures, row in zip(run, rows, strict=True)), strict=True)
    return ", ".join(f"{median(map(abs, column)):.2%}" for column in columns)


def _errors(figures: Case, row: Row) -> list[float]:
    """Return the errors of the figures that a side has."""
    measured = {name: int(row[f"peak_{name}_bytes"]) for name in COUNTERS[:2]}
    measured["process"] = measured["reserved"] + int(row["context_bytes"])
    return [figures[name] / measured[name] - 1 for name in COUNTERS if name in figures]


if __name__ == "__main__":
    main()
