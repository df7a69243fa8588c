"""Find the range of batch sizes for which a program agrees with captured runs."""

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

# To validate a program, a batch that takes this many bytes in addition to the model is run. The first is
# about the memory of all eight GPUs of the largest servers. If torch cannot index such sizes, or takes
# another path for them, a smaller amount is tried, down to the memory of one older GPU.
VALIDATION_BYTES = (2**41, 2**39, 2**36, 2**35, 2**34, 2**33)
# Steps of users may make noise, or matrices of all pairs, on the CPU, whose memory must hold them. So these
# programs are validated to smaller sizes first, and their range grows with runs beyond it.
STEP_VALIDATION_BYTES = VALIDATION_BYTES[2:]
PAIR_VALIDATION_BYTES = (2**33, 2**32, 2**31)
BISECT_RESOLUTION = 32  # the end of the valid range is found to 1/32 of the batch size
BATCH_ONE_BYTES = 2**30

Divergence = Callable[[int], str]  # batch size -> where a run diverges from the program; "" if the run agrees


def find_valid_range(
    program: Program,
    divergence: Divergence,
    least: int = FIT_BATCHES[0],
    tried_bytes: tuple[int, ...] = VALIDATION_BYTES,
) -> int:
    """Return the largest tried batch size at which a run agrees with the program, or 0 if none agrees.

    `least` is the program's smallest batch size. If a run disagrees and the next smaller run agrees, the end
    of the valid range is bisected between them.
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
    """Return the smallest batch size at which the live bytes that grow with it exceed `most_bytes`.

    Bytes that do not depend on the batch size are not counted. The result is at least `FIT_BATCHES[0] + 2` of
    the program's units.
    """
    growing = [
        replace(event, fixed_bytes=0) if isinstance(event, AffineAlloc) else event for event in program.events
    ]
    bound = live_bytes_bound(growing)
    units = bisect_right(range(LARGEST_BATCH), most_bytes, key=bound)
    return max(FIT_BATCHES[0] + 2, units) * program.unit


def needs_batch_one(program: Program) -> bool:
    """Return whether parameters or four samples exceed `BATCH_ONE_BYTES`, so that a plan may need batch 1."""
    allocs = (event for event in program.events if isinstance(event, AffineAlloc))
    fixed_bytes = sum(event.fixed_bytes for event in allocs if event.category is Category.PARAMETER)
    return fixed_bytes > BATCH_ONE_BYTES or batch_with_peak(program, BATCH_ONE_BYTES) <= FIT_BATCHES[0] + 2
