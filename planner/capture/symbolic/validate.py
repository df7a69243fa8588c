"""The range of batch sizes for which a program is validated against runs."""

from bisect import bisect_right
from collections.abc import Callable
from contextlib import suppress

from msgspec.structs import replace

from planner.errors import ModelError
from planner.program import (
    FIT_BATCHES,
    LARGEST_BATCH,
    AffineAlloc,
    Category,
    Program,
    live_bytes_bound,
)

# A batch that takes so much beside the model is run to validate a program: about as much as the largest
# servers' eight GPUs have together, or, where torch itself cannot count so far or takes other ways for so
# many, some GPUs, or smaller ones down to one of some years ago.
VALIDATION_BYTES = (2**41, 2**39, 2**36, 2**35, 2**34, 2**33)
# Steps of users make noise, or matrices of all pairs, on the CPU, which has to hold them: their range begins
# with these, and grows with runs beyond it.
STEP_VALIDATION_BYTES = VALIDATION_BYTES[2:]
PAIR_VALIDATION_BYTES = (2**33, 2**32, 2**31)
BISECT_RESOLUTION = 32  # the end of the valid range is found to one part in so many
BATCH_ONE_BYTES = 2**30

Divergence = Callable[[int], str]  # where a run at a batch size diverges from the program; "": nowhere


def find_valid_range(
    program: Program,
    divergence: Divergence,
    least: int = FIT_BATCHES[0],
    tried_bytes: tuple[int, ...] = VALIDATION_BYTES,
) -> int:
    """Return the largest batch size tried at which a run agrees with the program; 0 where it is wrong.

    `least` is the smallest of the program. Where one run disagrees and the next smaller one agrees, the end
    of the valid range is bisected.
    """
    other = 0  # a batch size at which a run disagrees
    for most_bytes in tried_bytes:
        batch = max(batch_with_peak(program, most_bytes), least + 2 * program.unit)
        with suppress(ModelError):  # too large for torch itself, or refused
            if not divergence(batch):
                return _bisect_valid_range(divergence, batch, other, program.unit)
            other = batch
    return 0


def _bisect_valid_range(divergence: Divergence, batch: int, other: int, unit: int) -> int:
    while other - batch > max(unit, batch // BISECT_RESOLUTION):
        middle = (batch + other) // (2 * unit) * unit
        if divergence(middle):
            other = middle
        else:
            batch = middle
    return batch


def batch_with_peak(program: Program, most_bytes: int) -> int:
    """Return a batch size at which what grows with it takes so much at once, or more."""
    growing = [
        replace(event, fixed_bytes=0) if isinstance(event, AffineAlloc) else event for event in program.events
    ]
    bound = live_bytes_bound(growing)
    units = bisect_right(range(LARGEST_BATCH), most_bytes, key=bound)
    return max(FIT_BATCHES[0] + 2, units) * program.unit


def needs_batch_one(program: Program) -> bool:
    """Return whether parameters or two samples take so much that one sample alone may be planned."""
    allocs = (event for event in program.events if isinstance(event, AffineAlloc))
    fixed_bytes = sum(event.fixed_bytes for event in allocs if event.category is Category.PARAMETER)
    return fixed_bytes > BATCH_ONE_BYTES or batch_with_peak(program, BATCH_ONE_BYTES) <= FIT_BATCHES[0] + 2
