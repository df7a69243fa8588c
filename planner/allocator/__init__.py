"""A simulator of PyTorch's caching allocator that computes with sizes and addresses only."""

from planner._support.lazy_exports import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
