"""Prevent transformers from detecting packed texts in position ids that a kernel made.

Without an attention mask, transformers reads from the GPU whether positions always increase by one. The
result of that comparison reads as zero, that is as false, and each model would get a mask that it gets on no
real GPU. Position ids that the script copied to the GPU are still checked.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

MODULE = "transformers.masking_utils"


def attach(masks: Any) -> None:
    """Patch transformers to detect packed texts only in position ids that the script copied to the GPU."""
    plain = getattr(masks, "find_packed_sequence_indices", None)
    is_tracing = getattr(masks, "is_tracing", None)
    if plain is None or is_tracing is None:
        return

    @wraps(plain)
    def find(position_ids: Any) -> Any:
        packed = plain(position_ids)
        if packed is None or not position_ids.is_cuda or is_tracing(packed):
            return packed
        known = position_ids.cpu() if position_ids.is_contiguous() else None
        if known is None or not known.any():  # a kernel made them, as transformers does: they count up
            return None
        return packed if plain(known) is not None else None

    masks.find_packed_sequence_indices = find
