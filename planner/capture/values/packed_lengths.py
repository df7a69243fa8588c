"""Treat packed sequences of unknown lengths as full.

Lengths are values of the batch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from planner.capture.patching import patched

NOTE = "lengths of packed sequences are values of the batch: each sample is assumed to have all {} steps"


@contextmanager
def full_lengths() -> Iterator[dict[str, None]]:
    """Pack sequences of unknown lengths as full inside the context, and yield a dict that collects notes."""
    notes: dict[str, None] = {}
    pack = torch._VF._pack_padded_sequence

    def pack_full(data: Tensor, lengths: Tensor, batch_first: bool) -> Any:
        """Pack a padded batch by `lengths`, or as full if `lengths` is unknown.

        `lengths` is unknown if it is a meta tensor or not all positive. A batch that is packed as full adds a
        note.
        """
        if lengths.is_meta or bool((lengths <= 0).any()):
            steps = data.shape[1 if batch_first else 0]
            lengths = torch.full(lengths.shape, steps, dtype=torch.int64)
            notes[NOTE.format(steps)] = None
        return pack(data, lengths, batch_first)

    with patched(torch._VF, "_pack_padded_sequence", pack_full):
        yield notes
