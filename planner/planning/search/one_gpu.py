"""Find the largest batch size of one job on one GPU, from few traces and few replays.

The probes follow from the job and the GPU alone, so the answer does not depend on other GPUs.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from math import lcm

from msgspec.structs import replace

from planner.allocator import MemoryLimits
from planner.errors import ModelError
from planner.hardware import Budget, judge_budget
from planner.jobs import Job
from planner.planning.search.boundary import (
    NEIGHBOURS,
    Search,
    largest_below,
    round_down,
    search_of,
)
from planner.planning.search.by_runs import search_by_runs
from planner.planning.search.replays import TargetReplays
from planner.program import FIT_BATCHES, Outcome

_MOST_JUDGED = 4  # searches, each with the margins of the previous answer


def search_judged(
    job: Job, replays: TargetReplays, budget: Budget, multiple_of: int = 1
) -> tuple[Search, Budget]:
    """Search for the largest batch size on a GPU, and return also the budget with the margins at that size.

    Margins depend on the batch size if the source of its convolution workspaces does. The first search uses
    the margins of the largest batch size whose tensors alone fit. The search is repeated with the margins of
    its answer until they stay the same, or `_MOST_JUDGED` searches were made. Raises the errors of a capture.
    """
    top = replays.top(budget.all_limits[0])
    if FIT_BATCHES[0] < top < replays.limit:
        with suppress(ModelError):
            budget = judge_budget(budget, job, replays.trace(top))
    for number in range(_MOST_JUDGED):
        search = search_device(replays, budget.all_limits, multiple_of)
        judged = judge_budget(budget, job, replays.trace(search.largest)) if search.largest else budget
        if judged is budget or number == _MOST_JUDGED - 1:
            break
        budget = judged
    return search, budget


def search_device(
    replays: TargetReplays, all_limits: tuple[MemoryLimits, ...], multiple_of: int = 1
) -> Search:
    """Return the largest batch sizes that fit on a GPU, with and without retries.

    Both are multiples of `multiple_of`. The search uses the smallest memory limit, the first of `all_limits`;
    a batch size that needs retries under that limit must fit under the other limits too. Batch sizes that the
    model refuses as too small are left out of the probes. Raises the errors of a capture.
    """
    search = replace(_search(replays, all_limits, multiple_of), least=replays.least)
    if not replays.too_small:
        return search
    probes = {size: own for size, own in search.probes if size not in replays.too_small}
    if not search.largest:
        probes[search.least] = replays.outcome_under_limits(search.least, all_limits)
    failures = (size for size, own in probes.items() if own is Outcome.DOES_NOT_FIT)
    return replace(search, first_failure=min(failures, default=None), probes=tuple(probes.items()))


def _search(replays: TargetReplays, all_limits: tuple[MemoryLimits, ...], multiple_of: int) -> Search:
    outcome = partial(replays.outcome_under_limits, all_limits=all_limits)
    if replays.bound is None:
        search = search_by_runs(replays, all_limits)
        return search if multiple_of == 1 else round_down(search, multiple_of, outcome)
    limits = all_limits[0]
    best = _largest(replays, limits)
    comfortable = replays.largest_without_retries(best, limits)
    probes = replays.probes[limits]
    if comfortable:
        probes[comfortable] = Outcome.FITS
    floor = _largest_probed(probes, outcome, comfortable)
    best = _largest_under_limits(outcome, floor, best)
    sizes = replays.batch_sizes
    rows = [(size, outcome(size) if size > floor else own) for size, own in [*probes.items()]]
    results = {sizes.floor(size): own for size, own in rows}
    search = search_of(results, *(size and sizes.floor(size) for size in (best, comfortable)))
    multiple = lcm(multiple_of, sizes.unit)
    return search if multiple == sizes.unit else round_down(search, multiple, outcome)


def _largest(replays: TargetReplays, limits: MemoryLimits) -> int:
    """Return the largest batch size that fits within memory limits.

    The next size is probed if only the bound excludes it.
    """
    top = replays.top(limits)
    best = largest_below(replays.fits(limits), top)
    if best == top < replays.limit:
        replays.outcome(top + 1, limits)
    return best


def _largest_probed(
    probes: Mapping[int, Outcome], outcome: Callable[[int], Outcome], comfortable: int
) -> int:
    """Return the largest probed batch size that fits under all memory limits.

    The result is `comfortable`, which fits without retries, if no larger probed batch size fits.
    """
    fitting = (size for size, own in probes.items() if own is not Outcome.DOES_NOT_FIT and size > comfortable)
    descending = sorted(fitting, reverse=True)
    return next((size for size in descending if outcome(size) is not Outcome.DOES_NOT_FIT), comfortable)


def _largest_under_limits(outcome: Callable[[int], Outcome], floor: int, top: int) -> int:
    """Return the largest batch size found to fit under all memory limits.

    Batch sizes from `floor` to `top` are searched. `floor` itself is known to fit. Batch sizes that fit
    irregularly under the smallest limit often have a neighbour that fits under all limits, so the neighbours
    below `top` are probed one by one.
    """

    def fits(batch: int) -> bool:
        return outcome(batch) is not Outcome.DOES_NOT_FIT

    if floor == top:
        return top
    near = range(top, max(floor, top - NEIGHBOURS), -1)
    found = next(filter(fits, near), None)
    return largest_below(fits, max(floor, top - NEIGHBOURS), floor) if found is None else found
