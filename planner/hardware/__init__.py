"""Describe GPUs, and the memory of a process on them outside the allocator."""

from planner._support.lazy_exports import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
