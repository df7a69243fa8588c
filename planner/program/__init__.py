"""The traces and programs of a training loop.

They consist of events, symbolic sizes and guards.
"""

from planner._support.lazy_exports import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
