"""Replay the steps of a process, which may use several models, through one simulated allocator."""

from planner._support.lazy_exports import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
