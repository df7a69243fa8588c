"""Hold emulated GPUs against the published runs of CNNs on an RTX 3060 and an RTX 4060.

    python -m benchmarks.emulated.cnns PYTHON           emulate them with this torch, store the figures
    python -m benchmarks.emulated.cnns PYTHON --caps    and the outcomes under the published caps
    python -m benchmarks.emulated.cnns                  print the tables of docs/emulator.md

PYTHON has the CUDA build of torch and torchvision; PLANNER_EMULATED_ADDRESSES=rising is passed on. Figures
go to cnns.csv beside this file. The measured figure is the rise of the process over its first sample, which
was taken when model and optimizer stood on the GPU (benchmarks/published/outcomes.py shows it); ours is the
peak reserved less the memory reserved there. Under a cap each run is emulated anew if it needs more than the
cap.
"""

import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.emulated.emulate import Case, emulate
from benchmarks.rows import read_lines, write_lines

HERE = Path(__file__).parent
PUBLISHED = HERE.parent / "published" / "runs_torch26.csv"
STATIC = HERE.parent / "accuracy" / "accuracy.csv"
FIGURES = HERE / "cnns.csv"
MIB = 2**20
ZERO_GRAD = {"0": "before_forward", "1": "before_backward", "2": "after_step"}  # README.md of PUBLISHED
FIELDS = (
    *("torch", "cudnn", "addresses", "line", "gpu", "model", "optimizer", "batch", "measured_rise_mib"),
    *("static_rise_mib", "rise_mib", "reserved_mib", "allocated_mib", "caps_right", "caps"),
)
Row = dict[str, str]


def published() -> list[tuple[int, Row]]:
    """Return the CNNs with their lines in the file."""
    rows = list(enumerate(read_lines(PUBLISHED), start=2))
    return [(line, row) for line, row in rows if row["library"] == "torchvision"]


def case_of(row: Row, cap_mib: int | None = None) -> Case:
    """Return the arguments of cnn_loop.py; without a record, zero_grad stands before the forward pass."""
    return {
        "model": "mnasnet1_0" if row["model"].startswith("MNASNet") else row["model"],
        "optimizer": row["optimizer"],
        "batch": int(row["batch"]),
        "input_shape": [int(size) for size in row["input_shape"].split("x")],
        "zero_grad": ZERO_GRAD.get(row["zero_grad_mode"], "before_forward"),
        "cap_mib": cap_mib,
    }


def caps_of(row: Row) -> dict[int, bool]:
    """Return the caps under which the run was repeated, each with True if it lived."""
    outcomes = re.findall(r"(\d+):(OOM|fits)", row["allocator_cap_tests"])
    return {int(cap): outcome == "fits" for cap, outcome in outcomes}


def emulate_all(python: str, with_caps: bool) -> list[dict[str, Any]]:
    """Return a line of figures for each row."""
    lines = []
    rows = published()
    for gpu in sorted({row["gpu"] for _, row in rows}):
        of_gpu = [(line, row) for line, row in rows if row["gpu"] == gpu]
        runs = emulate(python, gpu, "cnn_loop.py", [case_of(row) for _, row in of_gpu])
        capped = [
            (line, cap, case_of(row, cap))
            for (line, row), run in zip(of_gpu, runs, strict=True)
            for cap in caps_of(row)
            if with_caps and cap * MIB < run["reserved"]
        ]
        again = emulate(python, gpu, "cnn_loop.py", [case for *_, case in capped]) if capped else []
        lives = {key[:2]: run["fits"] for key, run in zip(capped, again, strict=True)}
        for (line, row), run in zip(of_gpu, runs, strict=True):
            outcomes = {cap: lives.get((line, cap), run["fits"]) for cap in caps_of(row) if with_caps}
            lines.append(_figures(line, row, run, outcomes))
    return lines


def _figures(line: int, row: Row, run: Case, outcomes: dict[int, bool]) -> dict[str, Any]:
    right = sum(lives == outcomes.get(cap) for cap, lives in caps_of(row).items())
    caps = " ".join(f"{cap}:{'fits' if lives else 'OOM'}" for cap, lives in outcomes.items())
    return {
        **{name: row[name] for name in ("gpu", "optimizer", "batch")},
        "model": row["model"].partition("(")[0],
        "line": line,
        "torch": run["torch"],
        "cudnn": run["cudnn"],
        "addresses": os.environ.get("PLANNER_EMULATED_ADDRESSES", "falling"),
        "measured_rise_mib": "" if row["oom_on_full_gpu"] == "True" else row["peak_nvml_delta_mib"],
        "static_rise_mib": _static_rises().get(line, ""),
        "rise_mib": (run["reserved"] - run["set_up"]) / MIB if run["fits"] else "",
        "reserved_mib": run["reserved"] / MIB,
        "allocated_mib": round(run["allocated"] / MIB, 3),
        "caps_right": f"{right} of {len(outcomes)}",
        "caps": caps,
    }


def _static_rises() -> dict[int, str]:
    """Return the static planner's figures for these runs, by line; benchmarks/accuracy computes them."""
    rows = [row for row in read_lines(STATIC) if row["source"] == "xMem's CNNs" and row["layer"] == "D"]
    return {int(row["case"].rpartition("line ")[2].rstrip(")")): row["planner"] for row in rows}


def _key(line: dict[str, Any]) -> tuple[str, ...]:
    return tuple(str(line[name]) for name in ("torch", "cudnn", "addresses"))


def store(lines: list[dict[str, Any]]) -> None:
    """Put the lines into the file in the place of those of the same versions and addresses."""
    others = [line for line in read_figures() if _key(line) != _key(lines[0])]
    rows = sorted([*others, *lines], key=_key)
    write_lines(FIGURES, FIELDS, ([row[name] for name in FIELDS] for row in rows))


def read_figures() -> list[Row]:
    """Return the lines of the file."""
    if not FIGURES.is_file():
        return []
    return read_lines(FIGURES)


def _errors(lines: Iterable[Row], column: str) -> list[float]:
    return [
        float(line[column]) / float(line["measured_rise_mib"]) - 1
        for line in lines
        if line["measured_rise_mib"] and line[column]
    ]


def _cell(errors: list[float]) -> str:
    sizes = [abs(error) for error in errors]
    return f"{median(sizes):.2%}, {max(errors, key=abs):+.2%}" if sizes else ""


def print_tables() -> None:
    """Print the median and the worst error of the rise, by model, and the outcomes under caps."""
    lines = read_figures()
    columns = sorted({_key(line) for line in lines})
    print("| model | n | static | " + " | ".join(", ".join(key) for key in columns) + " |")
    for model in [*sorted({line["model"] for line in lines}), "all"]:
        selected = [line for line in lines if model in (line["model"], "all")]
        first = [line for line in selected if _key(line) == columns[0]]
        cells = [_cell(_errors([x for x in selected if _key(x) == key], "rise_mib")) for key in columns]
        static = _errors(first, "static_rise_mib")
        print(f"| {model} | {len(static)} | {_cell(static)} | {' | '.join(cells)} |")
    for key in columns:
        counts = [line["caps_right"].partition(" of ") for line in lines if _key(line) == key]
        right, capped = (sum(int(count[column]) for count in counts) for column in (0, 2))
        print(", ".join(key), "caps right:", right, "of", capped)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        store(emulate_all(sys.argv[1], "--caps" in sys.argv[2:]))
    else:
        print_tables()
