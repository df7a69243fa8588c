"""Store, look up and fit calibrations, which correct estimates by measured runs."""

from planner._support.lazy_exports import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
