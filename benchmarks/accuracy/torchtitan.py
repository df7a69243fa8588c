"""The rows of torchtitan on one dimension: Llama 3.1 8B under FSDP2 on 8 and 128 H100, December 2024.

Each is the plan of the first rank, whose parts are as large as any: torchtitan reports the most of all ranks.
"""

import csv
from collections.abc import Mapping
from pathlib import Path

import planner
from benchmarks.accuracy.rows import Row, texts

TORCHTITAN = "torchtitan"
TABLE = Path(__file__).parents[1] / "published" / "torchtitan.csv"
_CARD = "H200"  # the database has no H100 of 96 GB: as many multiprocessors, the same compute capability
NOTE = (
    "given to 0.1 GiB; inferred after a first plan 5 % low: flash attention, and segments that do not "
    "expand, as its script for several nodes leaves them"
)


def torchtitan_rows() -> list[Row]:
    """Return peaks of reserved memory (C)."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        return [_row(line) for line in csv.DictReader(file)]


def _row(line: Mapping[str, str]) -> Row:
    batch, ranks = int(line["batch"]), int(line["ranks"])
    file = Path(__file__).with_name("torchtitan_steps.py")
    tokens = f"{line['length']}:int64"
    mode = {"compile": "default"} if line["step"] == "Compiled" else {}
    result = planner.estimate(
        f"{file}:{line['step']}", batch, gpu=_CARD, input=(tokens, tokens), world_size=ranks, **mode
    )
    case = f"{line['model']} {batch} x {line['length']} on {ranks} GPUs ({line['setting']})"
    truth = f"{float(line['value_gib']) * 1024}"
    estimates = texts({"planner": result.to_dict()["peak_reserved_mib"]})
    return Row(
        TORCHTITAN, "C", line["model"], case, "transformer", line["gpu"], batch, truth, estimates, note=NOTE
    )
