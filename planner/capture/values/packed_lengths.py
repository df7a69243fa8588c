"""Take packed sequences as full, since their lengths are values of the batch."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.utils import rnn

NOTE = (
    "lengths of packed sequences are values of the batch: all samples are taken as full, with {} steps each"
)


class _Functions:
    """torch's functions with another `_pack_padded_sequence`."""

    def __init__(self, plain: Any, notes: dict[str, None]) -> None:
        self._plain, self._notes = plain, notes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def _pack_padded_sequence(self, data: Tensor, lengths: Tensor, batch_first: bool) -> Any:
        """Pack by lengths that code gives as numbers; those of the batch are not known."""
        if lengths.is_meta or bool((lengths <= 0).any()):
            steps = data.shape[1 if batch_first else 0]
            lengths = torch.full(lengths.shape, steps, dtype=torch.int64)
            self._notes[NOTE.format(steps)] = None
        return self._plain._pack_padded_sequence(data, lengths, batch_first)


@contextmanager
def full_lengths() -> Iterator[dict[str, None]]:
    """Pack sequences of unknown lengths as full while open; yields notes, which fill."""
    notes: dict[str, None] = {}
    with mock.patch.object(rnn, "_VF", _Functions(rnn._VF, notes)):  # type: ignore[attr-defined]
        yield notes
