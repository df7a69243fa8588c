"""Make torchvision importable for all tests of captures, beside a torch without CUDA too."""

from planner.capture.models.torchvision.shim import prepare_torchvision

prepare_torchvision()
