"""The allocator events of a training loop (a trace), and their form for any batch size (a program)."""

from planner._support.lazy_exports import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
