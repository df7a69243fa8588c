"""Compare what replays need without workspaces of convolutions with what they need by a library's answers.

    python -m benchmarks.emulated.uncounted --cudnn FOLDER [--to FILE.csv]

The jobs are three-dimensional CNNs of torchvision and MONAI, which train with AdamW on an A100. A need is the
least memory in which a replay does not fail, to a MiB; a peak is what it reserves where nothing limits it.
Both are computed.
"""

import argparse
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.emulated.answers import needed_mib
from benchmarks.emulated.rows import add_row
from benchmarks.rows import read_rows
from planner.allocator.config import MemoryLimits, config_of_torch
from planner.allocator.replay import replay_trace
from planner.api.request import make_job
from planner.hardware.cudnn.published import PublishedWorkspaces
from planner.hardware.database import find_device
from planner.hardware.device import MIB
from planner.planning.programs import open_programs
from planner.program import ignore_progress
from planner.store import ProgramSource

UNCOUNTED = Path(__file__).with_name("uncounted.csv")
GPU = "A100 80GB"
PRECISIONS = ("fp32", "amp-fp16")
_VIDEOS = (("r3d_18", 112), ("mc3_18", 112), ("r2plus1d_18", 112), ("s3d", 224))
_UNET = {"channels": [16, 32, 64, 128, 256], "strides": [2, 2, 2, 2], "num_res_units": 2}
_DYN_UNET = {"kernel_size": [3] * 5, "strides": [1, 2, 2, 2, 2], "upsample_kernel_size": [2] * 4}
_ATTENTION = {"channels": [16, 32, 64, 128], "strides": [2, 2, 2]}
# Model, arguments, channels of input and output, extent, batch size.
_VOLUMES: tuple[tuple[str, dict[str, Any], int, int, int, int], ...] = (
    ("BasicUNet", {}, 4, 3, 96, 2),
    ("BasicUNet", {}, 4, 3, 128, 2),
    ("SegResNet", {"init_filters": 16}, 4, 3, 96, 1),
    ("SegResNet", {"init_filters": 16}, 4, 3, 128, 1),
    ("UNet", _UNET, 1, 2, 96, 4),
    ("UNet", _UNET, 1, 2, 128, 4),
    ("SwinUNETR", {"feature_size": 48}, 1, 14, 96, 1),
    ("SwinUNETR", {"feature_size": 48}, 4, 3, 128, 1),
    ("UNETR", {"img_size": 96}, 1, 14, 96, 1),
    ("DynUNet", _DYN_UNET, 1, 3, 128, 2),
    ("VNet", {}, 1, 2, 96, 2),
    ("AttentionUnet", _ATTENTION, 1, 2, 96, 2),
)


@dataclass(frozen=True, slots=True)
class UncountedRow:
    """One job without workspaces and with those that the library requests, in MiB."""

    number: int
    model: str
    input: str
    batch: int
    precision: str
    library_mib: int  # needs
    uncounted_mib: int
    library_peak_mib: int
    uncounted_peak_mib: int


def jobs() -> list[tuple[str, int, dict[str, Any]]]:
    """Return the model, the batch size and the options of each job."""
    videos = (
        (f"torchvision:{name}", 4, {"input": f"3x16x{size}x{size}", "target": "scalar:int64"})
        for name, size in _VIDEOS
    )
    return [*videos, *map(_of_volumes, _VOLUMES)]


def _of_volumes(row: tuple[str, dict[str, Any], int, int, int, int]) -> tuple[str, int, dict[str, Any]]:
    name, own, channels, classes, size, batch = row
    arguments = {"in_channels": channels, "out_channels": classes, **own}
    if "UNETR" not in name:
        arguments["spatial_dims"] = 3
    extents = f"{size}x{size}x{size}"
    options = {"input": f"{channels}x{extents}", "target": f"{classes}x{extents}", "loss": "bce_with_logits"}
    return f"monai:{name}", batch, {**options, "model_arg": arguments}


def compare_job(number: int, model: str, batch: int, options: dict[str, Any], cudnn: str) -> UncountedRow:
    """Plan one job with and without workspaces."""
    job, _, _ = make_job(model, {**options, "optimizer": "adamw", "cudnn": cudnn})
    programs = open_programs(job, ignore_progress)
    assert isinstance(programs, ProgramSource)
    needs, peaks = [], []
    for answers in (programs.convolutions, PublishedWorkspaces({})):
        source = ProgramSource(job, (), programs.open_builder, answers)
        trace = source.trace(batch, find_device(GPU).target)
        limits = MemoryLimits(config=config_of_torch(job.torch))
        needs.append(needed_mib(trace, batch, job.torch))
        peaks.append(replay_trace(trace, limits).peak_reserved_bytes // MIB)
    return UncountedRow(number, model, str(options["input"]), batch, job.precision.value, *needs, *peaks)


def main() -> None:
    """Plan the jobs without a row."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    parser.add_argument("--cudnn", required=True, help="the folder of the library")
    parser.add_argument("--to", type=Path, default=UNCOUNTED, metavar="FILE")
    options = parser.parse_args()
    known = {row.number for row in read_rows(options.to, UncountedRow)}
    for number, (precision, (model, batch, own)) in enumerate(product(PRECISIONS, jobs())):
        if number not in known:
            row = compare_job(number, model, batch, {**own, "precision": precision}, options.cudnn)
            add_row(options.to, row)
            print(row, flush=True)


if __name__ == "__main__":
    main()
