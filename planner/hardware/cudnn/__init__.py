"""Queries to an installed cuDNN for a GPU that is only described."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
