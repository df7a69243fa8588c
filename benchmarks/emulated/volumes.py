"""Compare needs of volumes by a library's answers, by stored answers, and without workspaces of convolutions.

    python -m benchmarks.emulated.volumes --cudnn FOLDER [--jobs 0-61] [--to FILE.csv]

The jobs are three-dimensional CNNs of torchvision and MONAI, which train with AdamW on an A100, and networks
of nnU-Net's plans with the recipe of nnU-Net. Some have sizes whose convolutions are stored, others none of
those. A need is the least memory in which a replay does not fail, to a MiB; a peak is what it reserves where
nothing limits it. All are computed.
"""

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.emulated.answers import add_rows, needed_mib, peak_mib
from planner.api.request.request import make_job
from planner.hardware.cudnn import PublishedWorkspaces, StoredWorkspaces
from planner.hardware.database import find_device
from planner.hardware.likeness import part_of_convolutions
from planner.planning.programs import open_programs
from planner.program import ignore_progress
from planner.store import ProgramSource

VOLUMES = Path(__file__).with_name("volumes.csv")
GPU = "A100 80GB"
PRECISIONS = ("fp32", "amp-fp16")
_VIDEOS = (
    *(
        ("r3d_18", "16x112x112"),
        ("mc3_18", "16x112x112"),
        ("r2plus1d_18", "16x112x112"),
        ("s3d", "16x224x224"),
    ),
    *(
        ("r3d_18", "24x128x128"),
        ("mc3_18", "16x160x160"),
        ("r2plus1d_18", "8x128x171"),
        ("s3d", "32x256x256"),
    ),
)
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
    ("BasicUNet", {"features": [24, 24, 48, 96, 192, 24]}, 2, 5, 112, 2),
    ("SegResNet", {"init_filters": 24}, 2, 5, 112, 1),
    ("UNet", {**_UNET, "channels": [24, 48, 96, 192, 384]}, 2, 5, 80, 2),
    ("SwinUNETR", {"feature_size": 36}, 2, 5, 64, 2),
    ("UNETR", {"img_size": 112}, 2, 5, 112, 1),
    ("DynUNet", {**_DYN_UNET, "filters": [24, 48, 96, 192, 256]}, 2, 5, 112, 2),
    ("VNet", {}, 2, 5, 80, 2),
    ("AttentionUnet", {**_ATTENTION, "channels": [24, 48, 96, 192]}, 2, 5, 80, 2),
)
_PLANS = "nnunet:tests/programs/nnunet/{}.json"
# Patches of nnU-Net's plans: those of its presets for 8 GB, and others.
_PATCHES = (
    *(("SizesPlans", (128, 128, 128)), ("SizesResEncPlans", (128, 128, 128)), ("SizesPlans", (96, 160, 160))),
    *(("SizesPlans", (96, 144, 112)), ("SizesResEncPlans", (64, 224, 160)), ("SizesPlans", (32, 192, 224))),
)


@dataclass(frozen=True, slots=True)
class VolumesRow:
    """One job without workspaces and with those that the library requests, in MiB."""

    number: int
    model: str
    input: str
    batch: int
    precision: str
    part: float  # of convolutions in what layers allocate
    convolutions: str  # the source of the stored answers: of the very convolutions, or some of similar ones
    library_mib: int  # needs
    stored_mib: int
    uncounted_mib: int
    library_peak_mib: int
    stored_peak_mib: int
    uncounted_peak_mib: int


Drawn = tuple[str, int, dict[str, Any]]  # model, batch size, options


def jobs() -> list[Drawn]:
    """Return the jobs; those of plans have their own precision and optimizer."""
    videos = (
        (f"torchvision:{name}", 4, {"input": f"3x{clip}", "target": "scalar:int64"}) for name, clip in _VIDEOS
    )
    drawn = [*videos, *map(_of_volumes, _VOLUMES)]
    recipes = ({"optimizer": "adamw", "precision": precision} for precision in PRECISIONS)
    trained = [(name, batch, {**own, **recipe}) for recipe, (name, batch, own) in product(recipes, drawn)]
    plans = (
        (_PLANS.format(name), 2, {"model_arg": {"patch_size": list(patch), "replan": True}})
        for name, patch in _PATCHES
    )
    return [*trained, *plans]


def _of_volumes(row: tuple[str, dict[str, Any], int, int, int, int]) -> Drawn:
    name, own, channels, classes, size, batch = row
    arguments = {"in_channels": channels, "out_channels": classes, **own}
    if "UNETR" not in name:
        arguments["spatial_dims"] = 3
    extents = f"{size}x{size}x{size}"
    options = {"input": f"{channels}x{extents}", "target": f"{classes}x{extents}", "loss": "bce_with_logits"}
    return f"monai:{name}", batch, {**options, "model_arg": arguments}


def compare_job(number: int, cudnn: str) -> VolumesRow:
    """Plan the job of a number by the three sources."""
    model, batch, options = jobs()[number]
    job, _, _ = make_job(model, {**options, "cudnn": cudnn})  # type: ignore[typeddict-item]
    programs = open_programs(job, ignore_progress)
    assert isinstance(programs, ProgramSource)
    needs, peaks, kind, part = [], [], "", 0.0
    stored = StoredWorkspaces(benchmark=False)
    for answers in (programs.convolutions, stored, PublishedWorkspaces({})):
        source = ProgramSource(job, (), programs.open_builder, answers)
        trace = source.trace(batch, find_device(GPU).target)
        kind = trace.conv_account.source.value if answers is stored else kind
        part = round(part_of_convolutions(trace), 3)
        peaks.append(peak_mib(trace, job.environment.torch))
        needs.append(needed_mib(trace, batch, job.environment.torch, peaks[-1]))
    shape = str(options.get("input") or options["model_arg"]["patch_size"])
    return VolumesRow(number, model, shape, batch, job.loop.precision.value, part, kind, *needs, *peaks)


if __name__ == "__main__":
    add_rows(__doc__, VOLUMES, VolumesRow, f"0-{len(jobs()) - 1}", compare_job)
