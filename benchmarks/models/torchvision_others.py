"""Plan torchvision's models for other tasks than classification: segmentation, video, flow, detection.

    python -m benchmarks.models.torchvision_others [--models REGEX] [--to FOLDER]

Detectors, whose shapes depend on values, have a CSV file of their own.
"""

from benchmarks.models.table import Entry, Table, run
from planner.capture.models.torchvision.shim import prepare_torchvision

NAME = "torchvision_others"
TITLE = "torchvision's models for segmentation, video and optical flow, planned"
ABOUT = (
    "The usual crops and clips of each (planner/jobs/sample_inputs.py); training: SGD, cross entropy per "
    "pixel or per clip, mean squares for flow. Inference: eval mode, no gradients. The models of "
    "torchvision.models.quantization are planned as they are built, in fp32; once quantized they run on the "
    "CPU alone."
)
DETECTION_GPU_MIB = 8_000  # each probe is a run of its own, the longer the more images
DETECTION_TITLE = "torchvision's detectors, planned"
DETECTION_ABOUT = (
    "Images of 480 x 640 with 8 objects each; training: SGD, the sum of the model's losses. How many boxes "
    "pass from one stage to the next depends on values, which are drawn at random on the CPU "
    "(planner/capture/values/interpreter.py), so sizes are no straight line in the batch size. Backbones are "
    "those of "
    "torchvision's defaults, as with weights: norms frozen, three stages trained, or four of VGG. Inference: "
    "eval mode, no gradients."
)


def main() -> None:
    """Plan, print, write."""
    libraries, detection = ["torchvision"], f"{NAME}_detection"
    run(
        Table(NAME, TITLE, ABOUT, entries(), libraries),
        Table(detection, DETECTION_TITLE, DETECTION_ABOUT, detectors(), libraries, DETECTION_GPU_MIB),
    )


def names_of(group: str) -> list[str]:
    """Return the names that torchvision lists in one of its modules of models."""
    prepare_torchvision()
    from torchvision import models

    return sorted(models.list_models(module=getattr(models, group)))


def entries() -> list[Entry]:
    """Return the entries of all models but the detectors."""
    return [
        Entry(name, f"torchvision:{group}.{name}")
        for group in ("segmentation", "video", "optical_flow", "quantization")
        for name in names_of(group)
    ]


def detectors() -> list[Entry]:
    """Return the entries of models that find boxes, masks and points."""
    return [Entry(name, f"torchvision:detection.{name}") for name in names_of("detection")]


if __name__ == "__main__":
    main()
