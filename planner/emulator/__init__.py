"""A GPU that is not there: real PyTorch on stand-in libraries."""

from planner._support.lazy_exports import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
