"""Emulate a GPU: run real PyTorch on stand-ins for NVIDIA's libraries."""

from planner._support.lazy_exports import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
