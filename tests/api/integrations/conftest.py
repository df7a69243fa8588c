"""Make torchvision importable for all tests of libraries, beside a torch without CUDA too."""

from planner.capture.models.torchvision.shim import prepare_torchvision

prepare_torchvision()
