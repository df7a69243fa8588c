"""Values that models read of kernels' results, where kernels compute nothing.

An emulated GPU answers 0 for what a kernel would have made (docs/emulator.md), and a model that decides by it
takes a way that no GPU takes. A script of the benchmarks calls `pin_values` where it runs as a command, so
that these functions of libraries decide as they do for its batches; the planner runs the same file without.
"""

from functools import wraps
from importlib import import_module
from typing import Any


def pin_values() -> None:
    """Let transformers find no packed texts: positions count up by one, and their differences are read."""
    masks = import_module("transformers.masking_utils")
    plain = masks.find_packed_sequence_indices

    @wraps(plain)
    def find(position_ids: Any) -> None:
        plain(position_ids)

    masks.find_packed_sequence_indices = find
