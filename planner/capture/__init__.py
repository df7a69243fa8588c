"""Capture training loops as traces.

The loops run with torch on meta tensors.
"""

from planner._support.lazy_exports import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
