"""Rows of the accuracy report from Liger's benchmarks of single operators: in plain PyTorch, and its own.

`benchmarks/published/README.md` names origin and loop; operator_loop.py repeats it.
"""

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.accuracy.rows import Row
from benchmarks.rows import read_lines
from planner.hardware.database import find_device
from planner.hardware.device import MIB

if TYPE_CHECKING:
    import torch

LIGER, KERNELS = "Liger's operators", "Liger's kernels"
PUBLISHED = Path(__file__).parents[1] / "published"
TABLE = PUBLISHED / "liger_operators.csv"
KERNEL_PEAKS = Path(__file__).with_name("liger_kernels.csv")  # written by liger_releases.py
KEYS = ("provider", "operator", "mode", "swept", "value", "settings")  # that name a published row
PLAIN = ("huggingface", "torch")  # the providers in plain PyTorch
GPUS = {
    "NVIDIA A100-SXM4-80GB": "A100 80GB",
    "NVIDIA H100 80GB HBM3": "H100 80GB",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "NVIDIA GeForce RTX 3090": "RTX 3090",
    "NVIDIA GeForce RTX 4090": "RTX 4090",
    "NVIDIA B200": "B200",
}
COMPILED = "torch.compile of torch 2.5 left a cycle of references to tensors of runs before: see below"
EARLIER = f"inferred: {COMPILED}, and when Python collects it is not known"
BLOCKS = "its blocks were cut from segments of runs before; in new ones, up to 1 MiB of each is left over"
DRAFT = "inferred: another script, since the published one is eight weeks younger"
CAUSES = {  # of a source and an operator
    (LIGER, "fused_linear_orpo_loss"): COMPILED,
    (LIGER, "fused_linear_simpo_loss"): COMPILED,
    (LIGER, "kto_loss"): EARLIER,
    (LIGER, "distill_jsd_loss"): DRAFT,
    (LIGER, "fused_linear_jsd"): BLOCKS,
    (LIGER, "distill_cosine_loss"): BLOCKS,
    (LIGER, "fused_moe"): "the tokens of each expert are drawn; ours are as many for each",
    (KERNELS, "fused_linear_orpo_loss"): COMPILED,
    (KERNELS, "fused_linear_cpo_loss"): COMPILED,
    (KERNELS, "fused_linear_simpo_loss"): COMPILED,
    (KERNELS, "distill_jsd_loss"): DRAFT,
    (KERNELS, "fused_linear_cross_entropy"): BLOCKS,
    (KERNELS, "multi_token_attention"): "workspaces of convolutions are those of cuDNN 9.20, not of 2025's",
    (KERNELS, "sparse_multi_token_attention"): "inferred: another script, since the published one is four "
    "weeks younger: the backward pass held a mask and a product more, as of operators in place of a kernel",
    (KERNELS, "llama4_rope"): "32 MiB: today's torch multiplies a column by a row without cuBLAS, whose "
    "workspace stayed",
    (KERNELS, "megatron_rms_norm"): "a plan tells Liger of 100 multiprocessors, the GPU has 132",
}
# What the second compilation of such a loss leaves, MiB, by preference_process.py: two weights of 1,002 and
# five inputs of a chunk, whose texts have 1,024 or 4,096 tokens.
HELD_MIB = {1024: 2084.047, 4096: 2324.188}
Line = Mapping[str, str]


def why_left_out(line: Line) -> str:
    """Return why a published row is not reproduced; "" if it is."""
    if line["operator"] == "embedding":
        return "the process holds 12 to 14 GiB of runs before, many times what the operator takes"
    if line["operator"] == "fused_linear_orpo_loss" and not is_kernel(line) and "T: 4096" in line["settings"]:
        return "settings that no published version of the script has"
    return ""


def published_lines() -> list[Line]:
    """Return the published rows."""
    return read_lines(TABLE)


def is_kernel(line: Line) -> bool:
    """Return whether a row is of Liger's own kernels, or of DeepSpeed's or Megatron's."""
    return line["provider"] not in PLAIN


def sizes_of(line: Line) -> dict[str, int]:
    """Return the sizes of a row, with the swept one."""
    sizes = {name: int(size) for name, size in re.findall(r"(\w+): (\d+)(?:;|$)", line["settings"])}
    return sizes | {line["swept"]: int(line["value"])}


def dtype_of(line: Line) -> "torch.dtype":
    """Return the type of a row's tensors; float32 where none is stated."""
    import torch

    dtype: torch.dtype = getattr(torch, _dtype_name(line))
    return dtype


def _dtype_name(line: Line) -> str:
    stated = re.search(r"dtype: torch\.(\w+)", line["settings"])
    return "float32" if stated is None else stated[1]


def operator_rows() -> list[Row]:
    """Return the peak allocated (B) of each row in plain PyTorch that is reproduced."""
    lines = (line for line in published_lines() if not is_kernel(line) and not why_left_out(line))
    return [_row(LIGER, line, {"planner": plain_peak_bytes(line)}) for line in lines]


def kernel_rows() -> list[Row]:
    """Return the peak allocated (B) of each row of kernels, by the release of its day and by the newest."""
    peaks = {tuple(one[name] for name in KEYS): one for one in read_lines(KERNEL_PEAKS)}
    rows = []
    for line in filter(is_kernel, published_lines()):
        planned = peaks[tuple(line[name] for name in KEYS)]
        both = {"planner": planned["peak_bytes"], "installed": planned["newest_peak_bytes"]}
        rows.append(_row(KERNELS, line, {name: int(size) for name, size in both.items()}))
    return rows


def plain_peak_bytes(line: Line) -> int:
    """Return the planned peak of a row in plain PyTorch."""
    from benchmarks.accuracy.operator_loop import peak_allocated_bytes
    from benchmarks.accuracy.operators import OPERATORS, Setting

    setting = Setting(line["mode"], sizes_of(line), dtype_of(line))
    target = find_device(GPUS[line["gpu"]]).target
    return peak_allocated_bytes(lambda: OPERATORS[line["operator"]](setting), target)


def _row(source: str, line: Line, peaks: Mapping[str, int]) -> Row:
    case = f"{_name(source, line)}, {line['swept']} {int(line['value']):,}"
    truth = f"{float(line['peak_allocated_gib']) * 1024:.3f}"
    estimates = {name: mib_as_published(peak) for name, peak in peaks.items()}
    return Row(source, "B", line["operator"], case, "operator", GPUS[line["gpu"]], 1, truth, estimates)


def _name(source: str, line: Line) -> str:
    """Return operator and mode, with what tells apart rows of the same operator."""
    special = ""
    if line["operator"] in ("softmax", "relu_squared"):
        special = f" {_dtype_name(line)}"
    elif line["operator"] == "fused_linear_orpo_loss" and "T: 4096" in line["settings"]:
        special = " T 4096"
    elif source == KERNELS and line["provider"] != "liger":
        special = f" ({line['provider']})"
    return f"{line['operator']} {line['mode']}{special}"


def with_held(row: Row) -> Row:
    """Return the row with what its process held of a compiled run before, where the cause says so."""
    if CAUSES.get((row.source, row.model)) != COMPILED:
        return row
    held_mib = HELD_MIB[4096 if " T 4096" in row.case else 1024]
    return replace(row, estimates={"planner": f"{float(row.estimates['planner']) + held_mib:.3f}"})


def mib_as_published(size_bytes: int) -> str:
    """Format a peak with the digits of the published ones: MiB in float32, then GiB to six digits."""
    (mib,) = struct.unpack("f", struct.pack("f", size_bytes / MIB))
    return f"{round(mib / 1024, 6) * 1024:.3f}"


def by_operator(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Group the rows by operator and mode, in the order of the table."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.case.partition(",")[0], []).append(row)
    return groups
