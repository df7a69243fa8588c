"""Configurations of nnU-Net's plans, trained as nnUNetTrainer does."""

from benchmarks.emulated.capabilities.case import Capability, Case
from benchmarks.emulated.capabilities.registry import HERE
from benchmarks.emulated.jobs import DrawnJob

_PLANS = f"nnunet:{(HERE / 'nnunet' / 'nnUNetPlans.json').relative_to(HERE.parents[2])}"
_JOBS: tuple[tuple[str, int, str, dict[str, object]], ...] = (
    ("2d", 12, "RTX 3090", {}),
    ("3d_fullres", 2, "A100 40GB", {}),
    ("3d_fullres", 3, "T4", {"batch_dice": True, "patch_size": [48, 64, 32]}),
    ("3d_residual", 2, "RTX 4090", {}),
)

CAPABILITY = Capability(
    "configurations of nnU-Net's plans with deep supervision, Dice and cross entropy",
    tuple(
        Case(DrawnJob(number, _PLANS, batch, gpu, {"model_arg": {"configuration": name, **more}}))
        for number, (name, batch, gpu, more) in enumerate(_JOBS, 1)
    ),
)
