"""Stores of programs: the user's cache, bundled files and saved files."""

from planner._support.lazy_exports import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
