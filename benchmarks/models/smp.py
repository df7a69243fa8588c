"""Plan every architecture of segmentation_models_pytorch with several encoders on one GPU.

python -m benchmarks.models.smp [--models REGEX] [--to FOLDER]
"""

from torch import nn

from benchmarks.models.table import Entry, Table, run
from planner.capture.models.torchvision.shim import prepare_torchvision

ENCODERS = ("resnet34", "efficientnet-b0", "mit_b0", "tu-convnext_tiny", "tu-mobilenetv3_large_100")
# Encoders for DPT, whose stages must have the same resolution.
PLAIN = ("tu-vit_base_patch16_224.augreg_in21k", "tu-vit_small_patch16_224", "tu-deit_small_patch16_224")


def main() -> None:
    """Plan, print, write."""
    prepare_torchvision()
    import segmentation_models_pytorch as smp

    names = sorted(name for name, value in vars(smp).items() if isinstance(value, type))
    entries = [
        Entry(f"{name} {encoder}", f"smp:{name}", {"encoder_name": encoder})
        for name in names
        if issubclass(getattr(smp, name), nn.Module)
        for encoder in (PLAIN if name == "DPT" else ENCODERS)
    ]
    about = (
        "Images of 256 x 256 (DPT: 224 x 224) with one class; training: SGD, binary cross entropy. "
        "Inference: eval mode, no gradients. Encoders that begin with tu- are timm's."
    )
    libraries = ["segmentation_models_pytorch", "timm"]
    run(Table("smp", "Architectures of segmentation_models_pytorch, planned", about, entries, libraries))


if __name__ == "__main__":
    main()
