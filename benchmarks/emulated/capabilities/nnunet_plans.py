"""Configurations of nnU-Net's plans, trained as nnUNetTrainer does."""

from benchmarks.emulated.capabilities.case import Capability, Case
from benchmarks.emulated.capabilities.registry import HERE
from benchmarks.emulated.jobs import DrawnJob

_FOLDER = (HERE / "nnunet").relative_to(HERE.parents[2])
_JOBS: tuple[tuple[str, str, int, str, dict[str, object]], ...] = (
    ("nnUNetPlans", "2d", 12, "RTX 3090", {}),
    ("nnUNetPlans", "3d_fullres", 2, "A100 40GB", {}),
    ("nnUNetPlans", "3d_fullres", 3, "T4", {"batch_dice": True, "patch_size": [48, 64, 32]}),
    ("nnUNetPlans", "3d_residual", 2, "RTX 4090", {}),
    ("SizesPlans", "2d", 12, "RTX 2080 Ti", {}),
    ("SizesPlans", "3d_fullres", 2, "RTX 3090", {}),
    ("SizesPlans", "3d_lowres", 2, "L4", {"batch_dice": True}),
    ("SizesPlans", "3d_thick", 2, "T4", {}),
    ("SizesResEncPlans", "2d", 16, "A10", {}),
    ("SizesResEncPlans", "3d_fullres", 2, "RTX 4090", {}),
    ("SizesResEncPlans", "3d_lowres", 2, "A100 40GB", {}),
    ("SizesResEncPlans", "3d_thick", 3, "RTX 5090", {}),
    ("SizesResEncPlans", "3d_fullres", 2, "H100 80GB", {"patch_size": [128, 192, 192], "replan": True}),
    ("SizesPlans", "3d_lowres", 3, "RTX 3060", {"patch_size": [64, 64, 64], "replan": True}),
    ("SizesPlans", "3d_fullres", 1, "H100 80GB", {"mode": "infer", "precision": "fp16"}),
    ("SizesPlans", "3d_thick", 2, "RTX 3090", {"cudnn_benchmark": True}),
    ("SizesResEncPlans", "2d", 12, "A100 40GB", {"cudnn_benchmark": True}),
)
_OF_JOB = ("mode", "precision", "cudnn_benchmark")


def _case(number: int, plans: str, name: str, batch: int, gpu: str, more: dict[str, object]) -> Case:
    options = {key: more[key] for key in _OF_JOB if key in more}
    arguments = {"configuration": name, **{key: more[key] for key in more if key not in options}}
    job = DrawnJob(number, f"nnunet:{_FOLDER / plans}.json", batch, gpu, {"model_arg": arguments, **options})
    return Case(job)


CAPABILITY = Capability(
    "configurations of nnU-Net's plans with deep supervision, Dice and cross entropy",
    tuple(_case(number, *job) for number, job in enumerate(_JOBS, 1)),
)
