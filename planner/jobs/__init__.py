"""Parse, check and complete jobs.

A job has a model, inputs and options, as users write them.
"""

from planner._support.lazy_exports import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
