"""Replay the steps of one process through one simulated allocator.

The process may use several models.
"""

from planner._support.lazy_exports import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
