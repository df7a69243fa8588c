"""Rows of torchtitan: Llama 3.1 8B under FSDP2 on 8 and 128 H100, 70B split over 256, December 2024.

Float8 is planned as torchtitan's documentation has it, with weights gathered in float8.

Each is the plan of the first rank, whose parts are as large as any: torchtitan reports the most of all ranks.
"""

from collections.abc import Mapping
from pathlib import Path

import planner
from benchmarks.accuracy.rows import Row, texts
from benchmarks.rows import read_lines

TORCHTITAN = "torchtitan"
TABLE = Path(__file__).parents[1] / "published" / "torchtitan.csv"
_CARD = "H200"  # the database has no H100 of 96 GB: as many multiprocessors, the same compute capability
NOTE = (
    "given to 0.1 GiB; inferred after a first plan 5 % low: flash attention, and segments that do not "
    "expand, as its script for several nodes leaves them"
)
FLOAT8_NOTE = "given to 0.1 GiB; settings as above; that weights are gathered in float8 is not stated"

SPLIT_NOTE = f"{FLOAT8_NOTE}; cause not known: planned once, after the others, with nothing adjusted"


def torchtitan_rows() -> list[Row]:
    """Return peaks of reserved memory (C)."""
    return [_row(line) for line in read_lines(TABLE)]


def _row(line: Mapping[str, str]) -> Row:
    batch, ranks = int(line["batch"]), int(line["ranks"])
    file = Path(__file__).with_name("torchtitan_steps.py")
    tokens = f"{line['length']}:int64"
    mode = {} if line["step"] == "Selective" else {"compile": "default"}
    result = planner.estimate(
        f"{file}:{line['step']}", batch, gpu=_CARD, input=(tokens, tokens), world_size=ranks, **mode
    )
    case = f"{line['model']} {batch} x {line['length']} on {ranks} GPUs ({line['setting']})"
    truth = f"{float(line['value_gib']) * 1024}"
    estimates = texts({"planner": result.to_dict()["peak_reserved_mib"]})
    note = FLOAT8_NOTE if "float8" in line["setting"] else NOTE
    note = SPLIT_NOTE if "TP" in line["setting"] else note
    return Row(
        TORCHTITAN, "C", line["model"], case, "transformer", line["gpu"], batch, truth, estimates, note=note
    )
