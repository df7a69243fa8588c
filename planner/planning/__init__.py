"""Answer questions on a job's memory: the largest batch, changes that help, and what takes the memory."""

from planner._support.lazy_exports import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
