"""Find why a process ran out of GPU memory, from its log, allocator history or `planner run` record."""

from planner._support.lazy_exports import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
