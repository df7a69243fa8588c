"""Rows of the accuracy report from Liger's benchmarks of single operators in plain PyTorch.

`benchmarks/published/README.md` names origin and loop; operator_loop.py repeats it.
"""

import csv
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.accuracy.rows import Row, texts
from planner.hardware.database import find_device
from planner.hardware.device import MIB

LIGER = "Liger's operators"
PUBLISHED = Path(__file__).parents[1] / "published"
TABLE = PUBLISHED / "liger_operators.csv"
LEFT_OUT = PUBLISHED / "finetuning_left_out.csv"
GPUS = {
    "NVIDIA A100-SXM4-80GB": "A100 80GB",
    "NVIDIA H100 80GB HBM3": "H100 80GB",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "NVIDIA GeForce RTX 3090": "RTX 3090",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "NVIDIA B200": "B200",
}
EARLIER = "inferred: the process holds memory of runs before, as much at every batch size"
BLOCKS = "its blocks were cut from segments of runs before; in new ones, up to 1 MiB of each is left over"
CAUSES = {
    "fused_linear_orpo_loss": EARLIER,
    "fused_linear_simpo_loss": EARLIER,
    "kto_loss": EARLIER,
    "distill_jsd_loss": "inferred: another script, since the published one is eight weeks younger",
    "fused_linear_jsd": BLOCKS,
    "distill_cosine_loss": BLOCKS,
    "fused_moe": "the tokens of each expert are drawn; ours are as many for each",
}
Line = Mapping[str, str]


def why_left_out(line: Line) -> str:
    """Return why a published row is not reproduced; "" if it is."""
    if line["operator"] == "embedding":
        return "the process holds 12 to 14 GiB of runs before, many times what the operator takes"
    if line["operator"] == "softmax":
        return "recorded 1,024 times too small, which leaves one or two digits"
    if line["operator"] == "fused_linear_orpo_loss" and "T: 4096" in line["settings"]:
        return "settings that no published version of the script has"
    return ""


def published_lines() -> list[Line]:
    """Return the published rows of operators in plain PyTorch."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def sizes_of(line: Line) -> dict[str, int]:
    """Return the sizes of a row, with the swept one."""
    sizes = {name: int(size) for name, size in re.findall(r"(\w+): (\d+)(?:;|$)", line["settings"])}
    return sizes | {line["swept"]: int(line["value"])}


def operator_rows() -> list[Row]:
    """Return the peak allocated (B) of each row that is reproduced."""
    return [_row(line) for line in published_lines() if not why_left_out(line)]


def _row(line: Line) -> Row:
    from benchmarks.accuracy.operator_loop import peak_allocated_bytes
    from benchmarks.accuracy.operators import OPERATORS

    operator, mode, sizes = line["operator"], line["mode"], sizes_of(line)
    target = find_device(GPUS[line["gpu"]]).target
    peak_bytes = peak_allocated_bytes(lambda: OPERATORS[operator](mode, sizes), target)
    case = f"{operator} {mode}, {line['swept']} {int(line['value']):,}"
    truth = f"{float(line['peak_allocated_gib']) * 1024:.3f}"
    estimates = texts({"planner": peak_bytes / MIB})
    return Row(LIGER, "B", operator, case, "operator", GPUS[line["gpu"]], 1, truth, estimates)


def by_operator(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Group the rows by operator and mode, in the order of the table."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.case.partition(",")[0], []).append(row)
    return groups


def left_out() -> Iterator[tuple[str, int, str]]:
    """Yield source, count and reason of single-GPU rows that are not reproduced."""
    reasons = Counter(why for line in published_lines() if (why := why_left_out(line)))
    for reason, count in reasons.items():
        yield "linkedin/Liger-Kernel", count, reason
    with LEFT_OUT.open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            yield line["source"], int(line["rows"]), line["reason"]
