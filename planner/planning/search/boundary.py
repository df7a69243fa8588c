"""Search for the largest batch size that fits: gallop, bisect, then probe the neighbours above.

The caching allocator is not monotone: a larger batch may fall into other segments and fit although a smaller
batch did not. benchmarks/fits/search_neighbours.py counts the batch sizes that fit above a batch size that
does not (islands). Islands are common if single parameters are as large as activations: of 160 random
capacities for AlexNet and VGG-11, bisection alone misses the largest batch size for 71; probing the
neighbours of each boundary, and continuing from a neighbour that fits, for 12. Of 400 capacities for five
other models, the two methods miss it for 1 and 0.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from planner.program import LARGEST_BATCH, Outcome

NEIGHBOURS = 8  # the batch sizes up to this far above the boundary are probed
NEIGHBOUR_SHARES = (0.02, 0.03, 0.05, 0.08)  # and the batch sizes these shares of the boundary above it
MOST_LINES = 4  # lines to follow; after them the guess is good, or further lines do not improve it
MOST_STRETCH = 8  # a line is not followed beyond this many times the batch size at its end
STEPS_WITH_RETRIES = 64  # the first step above an answer without retries is the answer divided by this
MOST_ISLANDS = 32  # islands to follow, so that the number of probes stays logarithmic for any function


class Search(Struct, frozen=True):
    """The largest batch sizes with and without retries that a search found, with every probe in order."""

    largest: int  # the largest batch size that fits; 0 if not even `least` fits
    comfortable: int  # the largest batch size that fits without retries, at most `largest`; 0 if none fits
    first_failure: int | None  # the smallest probed batch size that does not fit; None if all of them fit
    probes: tuple[tuple[int, Outcome], ...]
    least: int = 1  # the smallest batch size that the model takes, as far as smaller sizes were tried


class _Probes(dict[int, Outcome]):
    """Outcomes by batch size, in the order of the probes; a missing outcome is probed when looked up."""

    def __init__(self, outcome: Callable[[int], Outcome]) -> None:
        self._outcome = outcome

    def __missing__(self, batch: int) -> Outcome:
        self[batch] = self._outcome(batch)
        return self[batch]

    def fits(self, batch: int) -> bool:
        return self[batch] is not Outcome.DOES_NOT_FIT

    def fits_without_retries(self, batch: int) -> bool:
        return self[batch] is Outcome.FITS


def search_of(probes: Mapping[int, Outcome], largest: int, comfortable: int) -> Search:
    """Create a `Search` from its probes and its two answers.

    `comfortable` is replaced by `largest` if `largest` fits without retries.
    """
    if probes.get(largest) is Outcome.FITS:
        comfortable = largest
    failures = (batch for batch, outcome in probes.items() if outcome is Outcome.DOES_NOT_FIT)
    return Search(largest, comfortable, min(failures, default=None), tuple(probes.items()))


def largest(outcome: Callable[[int], Outcome], limit: int = LARGEST_BATCH) -> Search:
    """Find the largest batch sizes up to `limit` that fit, with and without retries.

    Each batch size is probed at most once. The result is exact if outcomes only worsen with the batch size.
    Otherwise `largest` fits, and neither its successor nor the probed neighbours above it fit; the same holds
    for `comfortable`, without retries, up to `largest`.
    """
    probes = _Probes(outcome)
    best = scan_islands(probes.fits, 0, limit)
    comfortable = max((batch for batch, result in probes.items() if result is Outcome.FITS), default=0)
    if comfortable < best:
        above = min(batch for batch in probes if batch > comfortable)  # it takes retries or fails
        start = _bisect(probes.fits_without_retries, comfortable, above)
        comfortable = scan_islands(probes.fits_without_retries, start, best)
    return search_of(probes, best, comfortable)


def largest_below(fits: Callable[[int], bool], top: int, floor: int = 0) -> int:
    """Search downwards for a batch size that fits and above which no probed neighbour fits.

    The result is in `floor`..`top`. Batch sizes above `top` are assumed not to fit, and `floor` is assumed to
    fit. The search descends from `top`, so that one of the largest is found if batch sizes fit irregularly.
    `fits` should cache its results.
    """
    low, high, stride = top, top + 1, 1
    while low > floor and not fits(low):
        low, high, stride = max(floor, low - stride), low, 2 * stride
    return scan_islands(fits, _bisect(fits, low, high), top)


def largest_by_extrapolation(
    outcome: Callable[[int], Outcome],
    needs: Sequence[Callable[[int], int]],
    max_reserved_bytes: int,
    ends: tuple[int, int],
    limit: int = LARGEST_BATCH,
    elements: Callable[[int], int] = int,
) -> Search:
    """Find the largest batch sizes with and without retries in about five probes, by extrapolating memory.

    The answers equal the answers of `largest` if outcomes only worsen with the batch size. `needs` return the
    bytes that a batch size needs without retries (reserved) and with retries (allocated). Each need is
    extrapolated along lines over `elements` of the batch size, which rise with the batch size; the first line
    goes through both `ends`. Neighbours above the first batch size that does not fit are not probed. Without
    a second function in `needs`, batch sizes with retries are searched in growing steps, starting at the
    answer without retries. `largest` is called if a need does not grow with the batch size.
    """
    guesses = [_extrapolate(need, max_reserved_bytes, ends, limit, elements) for need in needs]
    if None in guesses:
        return largest(outcome, limit)
    comfortable, retrying = guesses[0] or 1, guesses[-1] or 1
    stride = 1 if len(needs) > 1 else max(1, comfortable // STEPS_WITH_RETRIES)
    return largest_near(outcome, (comfortable, retrying), limit, stride)


def _extrapolate(
    need_bytes: Callable[[int], int],
    max_bytes: int,
    ends: tuple[int, int],
    limit: int,
    elements: Callable[[int], int],
) -> int | None:
    """Return a batch size that needs about `max_bytes`, or None if memory does not grow."""
    low, guess = ends
    following = guess
    for _ in range(MOST_LINES):
        slope_bytes = (need_bytes(guess) - need_bytes(low)) / (elements(guess) - elements(low))
        if slope_bytes <= 0:
            return None
        most = elements(guess) + int((max_bytes - need_bytes(guess)) // slope_bytes)
        numbers = range(1, min(MOST_STRETCH * guess, limit) + 1)
        following = max(1, bisect_right(numbers, most, key=elements))
        if following in (low, guess):
            break
        guess = following
    return following


def largest_near(
    outcome: Callable[[int], Outcome], guesses: tuple[int, int], limit: int = LARGEST_BATCH, stride: int = 1
) -> Search:
    """Find the largest batch sizes with and without retries, starting from two guesses.

    Each answer fits and its successor does not. If the guess of the largest batch size with retries and
    its successor both fit, `stride` is the step that follows. `outcome` should cache its results.
    """
    probes = _Probes(outcome)
    comfortable = boundary_from_guess(probes.fits_without_retries, guesses[0], limit)
    guess = max(comfortable, guesses[1]) if guesses[1] > guesses[0] else comfortable
    return search_of(probes, boundary_from_guess(probes.fits, guess, limit, stride), comfortable)


def boundary_along_lines(
    fits: Callable[[int], bool], need_bytes: Callable[[int], int], max_bytes: int, start: int, limit: int
) -> int:
    """Return a batch size that fits but whose successor fails, by linear extrapolation.

    The search begins at `start`, which is assumed to fit, and ends at `limit`. Guesses are extrapolated
    linearly from the memory of the last two batch sizes that fit, at first from 0 bytes at batch size 0 and
    the memory at `start`. `need_bytes` is called only for batch sizes that fit. `fits` should cache its
    results.
    """
    low, guess, low_bytes = 0, start, 0
    for _ in range(MOST_LINES):
        slope_bytes = (need_bytes(guess) - low_bytes) / (guess - low)
        if slope_bytes <= 0:
            break
        more = int((max_bytes - need_bytes(guess)) // slope_bytes)
        low, low_bytes, guess = guess, need_bytes(guess), min(guess + more, MOST_STRETCH * guess, limit)
        if guess <= low:
            break
        if not fits(guess):
            return boundary_between(fits, low, guess)
    return boundary_from_guess(fits, max(low, guess), limit)


def boundary_between(fits: Callable[[int], bool], low: int, high: int) -> int:
    """Return a batch size that fits but whose successor fails, probing `high - 1` first.

    The result is in [low, high). `low` is assumed to fit, and `high` not to. `high` is a guess that is often
    one too large.
    """
    if high - low < 2 or fits(high - 1):
        return high - 1
    return _bisect(fits, low, high - 1)


def boundary_above(fits: Callable[[int], bool], low: int, high: int) -> int:
    """Return a batch size that fits but whose successor fails: try `low + 1`, then bisect up to `high`.

    The result is in [low, high). `low` is assumed to fit, and `high` not to. `low` is a guess that is often
    right.
    """
    if high - low < 2 or not fits(low + 1):
        return low
    return _bisect(fits, low + 1, high)


def round_down(search: Search, multiple: int, outcome: Callable[[int], Outcome]) -> Search:
    """Return the search with its answers rounded down to multiples of `multiple` that fit.

    Each answer becomes the largest multiple up to it that fits, or 0 if no multiple fits. `first_failure` is
    unchanged, even if it is no multiple.
    """
    probes = _Probes(outcome)

    def down(answer: int, fits: Callable[[int], bool]) -> int:
        return next(filter(fits, range(answer - answer % multiple, 0, -multiple)), 0)

    best = down(search.largest, probes.fits)
    found = search_of(probes, best, down(min(best, search.comfortable), probes.fits_without_retries))
    tried = (*search.probes, *found.probes)
    return replace(found, first_failure=search.first_failure, probes=tried, least=search.least)


def boundary_from_guess(fits: Callable[[int], bool], guess: int, limit: int, stride: int = 1) -> int:
    """Return a batch size that fits but whose successor fails, starting from a guess.

    The result is at most `limit`, and 0 if not even batch size 1 fits. A good guess takes two or three
    probes. If the guess and its successor both fit, `stride` is the step that follows. `fits` should cache
    its results.
    """
    low = high = max(0, min(guess, limit))
    step = 1
    while low and not fits(low):
        high, low = low, max(0, low - step)
        step = 2 * step if guess - low > 1 else 1
    step = 1
    while high == low and low < limit:
        high = min(low + step, limit)
        if fits(high):
            low, step = high, stride if low == guess else 2 * step
    return _bisect(fits, low, high)


def scan_islands(fits: Callable[[int], bool], low: int, limit: int) -> int:
    """Search upwards for a batch size that fits and above which no probed neighbour fits.

    The result is in `low`..`limit`, and its successor does not fit either. `low` is assumed to fit. At most
    `MOST_ISLANDS` neighbours that fit are followed.
    """
    best = _boundary(fits, low, limit)
    for _ in range(MOST_ISLANDS):
        island = next((batch for batch in _neighbours(best, limit) if fits(batch)), None)
        if island is None:
            break
        best = _boundary(fits, island, limit)
    return best


def _boundary(fits: Callable[[int], bool], low: int, limit: int) -> int:
    """Return a batch size that fits but whose successor fails, or `limit`, galloping up from `low`.

    `low` is assumed to fit.
    """
    stride = 1
    while low < limit:
        high = min(low + stride, limit)
        if not fits(high):
            return _bisect(fits, low, high)
        low, stride = high, stride * 2
    return limit


def _bisect(fits: Callable[[int], bool], low: int, high: int) -> int:
    """Return a batch size in [low, high) that fits but whose successor fails, by bisection.

    `low` is assumed to fit.
    """
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def _neighbours(best: int, limit: int) -> Iterator[int]:
    """Yield the neighbours to probe above `best`, in ascending order.

    The successor of `best` is left out, since it is known not to fit.
    """
    distances = {*range(2, NEIGHBOURS + 1), *(round(share * best) for share in NEIGHBOUR_SHARES)}
    for distance in sorted(distances):
        if distance > 1 and best + distance <= limit:
            yield best + distance
