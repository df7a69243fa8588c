"""The range of batch sizes for which a program is validated against runs."""

from collections.abc import Callable
from contextlib import suppress

from planner.errors import ModelError
from planner.program import FIT_BATCHES, LARGEST_BATCH, AffineAlloc, Category, Free, Program

# A batch that takes so much beside the model is run to validate a program: about as much as the largest
# servers' eight GPUs have together, or, where torch itself cannot count so far or takes other ways for so
# many, some GPUs, or smaller ones down to one of some years ago.
VALIDATION_BYTES = (2**41, 2**39, 2**36, 2**35, 2**34, 2**33)
BISECT_RESOLUTION = 32  # the end of the valid range is found to one part in so many
BATCH_ONE_BYTES = 2**30

Divergence = Callable[[int], str]  # where a run at a batch size diverges from the program; "": nowhere


def find_valid_range(program: Program, divergence: Divergence) -> int:
    """Return the largest batch size tried at which a run agrees with the program; 0 where it is wrong.

    Where one run disagrees and the next smaller one agrees, the end of the valid range is bisected.
    """
    other = 0  # a batch size at which a run disagrees
    for most_bytes in VALIDATION_BYTES:
        batch = batch_with_peak(program, most_bytes)
        with suppress(ModelError):  # too large for torch itself
            if not divergence(batch):
                return _bisect_valid_range(divergence, batch, other)
            other = batch
    return 0


def _bisect_valid_range(divergence: Divergence, batch: int, other: int) -> int:
    while other - batch > max(1, batch // BISECT_RESOLUTION):
        middle = (batch + other) // 2
        if divergence(middle):
            other = middle
        else:
            batch = middle
    return batch


def batch_with_peak(program: Program, most_bytes: int) -> int:
    """Return a batch size at which what grows with it takes so much at once, or more."""
    now = most = 0
    slopes: dict[int, int] = {}
    for event in program.events:
        if isinstance(event, AffineAlloc):
            slopes[event.block] = event.bytes_per_sample
            now += event.bytes_per_sample
            most = max(most, now)
        elif isinstance(event, Free):
            now -= slopes[event.block]
    return max(FIT_BATCHES[0] + 2, min(most_bytes // max(most, 1) + 1, LARGEST_BATCH))


def needs_batch_one(program: Program) -> bool:
    """Return whether parameters or two samples take so much that one sample alone may be planned."""
    allocs = (event for event in program.events if isinstance(event, AffineAlloc))
    fixed_bytes = sum(event.fixed_bytes for event in allocs if event.category is Category.PARAMETER)
    return fixed_bytes > BATCH_ONE_BYTES or batch_with_peak(program, BATCH_ONE_BYTES) <= FIT_BATCHES[0] + 2
