"""The largest batch size of one job on one or many GPUs, from few traces and as few replays as that takes.

GPUs of one kind share their traces. A replay that fits without releasing cached memory is the same on every
GPU that has its peak, and where tensors alone exceed a GPU, no replay is needed to know that the batch does
not fit.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import groupby
from statistics import linear_regression

from msgspec import Struct, field as msgspec_field
from msgspec.structs import replace

from planner.allocator import MemoryLimits, replay_trace
from planner.errors import BatchTooLargeError
from planner.hardware import Budget, process_bytes, upper_process_bytes
from planner.jobs import Job
from planner.planning.epoch import max_useful_batch
from planner.planning.estimate import Seconds, unlimited
from planner.planning.replays import ReplayCache, TargetReplays
from planner.planning.search import (
    Search,
    boundary_from_guess,
    largest_by_extrapolation,
    round_down,
    scan_islands,
)
from planner.program import FIT_BATCHES, Outcome, ProgramSet, Target

FEW = 8  # GPUs that take no longer together than a person waits, with all probes
USUAL_ERROR = 2  # of a guess, in samples; of large batches, a hundredth
USUAL_GAP = 10  # below the bound's largest, in samples; of large batches, one part in so many
SAMPLE = 4  # GPUs that are probed for batch sizes that fit above some that do not
USUAL_SHARE = 0.97  # of what the bound allows, most jobs reach about so much


class DeviceFit(Struct, frozen=True):
    """The answer for one GPU."""

    budget: Budget
    max_batch: int  # 0 where not even 1 fits
    batch: int  # that the figures below are of: the requested one, else the largest, else 1
    outcome: Outcome  # of that batch on this GPU
    process_bytes: int  # what nvidia-smi shows at its peak; on a GPU without limits where it does not fit
    process_upper_bytes: int  # the same at the confidence
    comfortable_batch: int  # the largest without retries; 0 where none runs without

    @property
    def headroom_bytes(self) -> int:
        """Return the GPU's memory beside the process; negative if it does not fit."""
        return self.budget.device.usable.value - self.process_bytes

    @property
    def is_calibrated(self) -> bool:
        """Return whether a line through measured runs of this job answers, and not the defaults."""
        return self.budget.correction is not None and self.budget.correction.fit is not None


class FleetTable(Struct, frozen=True):
    """One job on many GPUs, with the search's timing."""

    job: Job
    batch: int | None  # None where the largest of each GPU is requested
    confidence: float
    fits: tuple[DeviceFit, ...]  # in the requested order
    left_out: int  # GPUs that do not run the requested batch
    notes: tuple[str, ...]
    unknown_ops: tuple[str, ...]
    import_seconds: float
    seconds: Seconds
    programs: ProgramSet  # that answered; a picture needs more traces
    multiple_of: int = 1  # that the largest batches had to be


def curve(table: FleetTable, points: int = 40) -> tuple[tuple[int, int], ...]:
    """Return batch sizes up to the largest of any GPU, and what the process takes on the middle one."""
    by_size = sorted((fit for fit in table.fits if fit.max_batch), key=lambda fit: fit.max_batch)
    budget, top = by_size[len(by_size) // 2].budget, by_size[-1].max_batch
    sizes = sorted({max(1, round(top * step / points)) for step in range(points + 1)})
    plain, limits = replace(budget, correction=None), unlimited(budget.limits)
    rows = []
    for size in sizes:
        run = replay_trace(table.programs.trace(size, budget.device.target), limits)
        rows.append((size, process_bytes(plain, run.peak_reserved_bytes)))
    return tuple(rows)


class DeviceGroup(Struct, frozen=True):
    """The GPUs of one kind, by rising memory, and the largest batch size within each one's memory."""

    replays: TargetReplays
    budgets: tuple[Budget, ...]
    largest: dict[MemoryLimits, int] = msgspec_field(default_factory=dict)

    def search(self, limits: MemoryLimits, multiple_of: int, *, is_one_of_few: bool) -> Search:
        """Return the search of a GPU, rounded down to a multiple.

        For one of few GPUs, the neighbours above the largest batch size without retries are probed as well.
        """
        best, replays = self.largest[limits], self.replays
        if best < replays.limit:
            replays.outcome(best + 1, limits)
        comfortable = replays.largest_without_retries(best, limits)
        if is_one_of_few and comfortable < best and replays.bound is not None:
            comfortable = scan_islands(replays.fits_without_retries(limits), comfortable, best)
        probes = replays.probes[limits]
        if comfortable:
            probes[comfortable] = Outcome.FITS
        failures = [size for size, outcome in probes.items() if outcome is Outcome.DOES_NOT_FIT]
        search = Search(best, comfortable, min(failures, default=None), tuple(probes.items()))
        if multiple_of == 1:
            return search
        return round_down(search, multiple_of, lambda size: replays.outcome(size, limits))


def fit_devices(
    job: Job, budgets: Iterable[Budget], programs: ProgramSet, batch: int | None = None, multiple_of: int = 1
) -> tuple[DeviceFit, ...]:
    """Return the largest batch size of each GPU, and the figures at `batch` or, by default, at the largest.

    Answers are the largest multiples of `multiple_of` that fit.
    """
    groups = search_fleet(job, budgets, programs)
    is_one_of_few = sum(len(group.budgets) for group in groups) <= FEW
    return tuple(
        _fit(group, budget, batch, multiple_of, is_one_of_few=is_one_of_few)
        for group in groups
        for budget in group.budgets
    )


def search_fleet(job: Job, budgets: Iterable[Budget], programs: ProgramSet) -> list[DeviceGroup]:
    """Find the largest batch size of each GPU. Raises the errors of a capture.

    Batch sizes that fit above some that do not are a habit of the job, not of the GPU: one that stays below
    the line of the others is searched anew from batch 1 on, and where that finds more, so is every GPU, since
    with such a job the answer depends on the way of searching. So that smaller ones show as well, the
    neighbours above the answers of some GPUs are probed, and where one fits, those of every GPU are.
    """
    cards = sorted(budgets, key=lambda budget: (_kind(budget), budget.device.usable.value))
    replays, limit = ReplayCache(programs), max_useful_batch(job)
    groups = [
        DeviceGroup(TargetReplays(replays, target, programs.bound(target), limit), tuple(group))
        for target, group in ((Target(*kind), group) for kind, group in groupby(cards, key=_kind))
    ]
    gaps: list[tuple[int, int]] = []  # the bound's largest batch, and how far below it a GPU stays
    low = [(group, limits) for group in groups for limits in _search_group(group, gaps)]
    for search, probed in ((_search_alone, low), (_scan, _sample(groups))):
        if any(search(group, limits) != group.largest[limits] for group, limits in probed):
            for group in groups:
                group.largest.update({limits: search(group, limits) for limits in group.largest})
            break
    return groups


def _kind(budget: Budget) -> tuple[tuple[int, int], int]:
    target = budget.device.target
    return target.capability, target.sm_count


def _search_group(group: DeviceGroup, gaps: list[tuple[int, int]]) -> list[MemoryLimits]:
    """Find the boundary of each GPU from those of the GPUs before, which `gaps` remembers.

    Returns those that lie lower than could be guessed. Where each probe is a run of the model, lines through
    the needs of batch sizes guide the search, and no GPU is known to lie low.
    """
    low = []
    replays = group.replays
    for limits in dict.fromkeys(budget.limits for budget in group.budgets):
        if replays.bound is None:
            group.largest[limits] = _search_by_line(replays, limits)
            continue
        top = replays.top(limits)
        guess = _guess(gaps, top)
        best = group.largest[limits] = boundary_from_guess(replays.fits(limits), guess, top)
        is_low = best < guess - max(USUAL_ERROR, guess // 100)
        if top < replays.limit and (is_low or top - best > max(USUAL_GAP, top // USUAL_GAP)):
            low.append(limits)
        if best and top < replays.limit:
            gaps.append((top, top - best))
    return low


def _search_by_line(replays: TargetReplays, limits: MemoryLimits) -> int:
    max_reserved_bytes = limits.allocator_limit_bytes
    if max_reserved_bytes is None:
        return boundary_from_guess(replays.fits(limits), replays.limit, replays.limit)
    outcome = partial(replays.outcome, limits=limits)
    need_bytes = partial(replays.peak_without_limits, limits=limits)
    try:
        ends, most = FIT_BATCHES, replays.limit
        return largest_by_extrapolation(outcome, need_bytes, max_reserved_bytes, ends, most).largest
    except BatchTooLargeError:  # the line leads beyond what can be captured
        return boundary_from_guess(replays.fits(limits), 0, replays.limit)


def _guess(gaps: list[tuple[int, int]], top: int) -> int:
    """Return the batch size as far below the bound's largest as the line of the other GPUs."""
    tops = [above for above, _ in gaps]
    if len(set(tops)) < 2:
        return round(USUAL_SHARE * top)
    line = linear_regression(tops, [gap for _, gap in gaps])
    return max(1, top - round(max(0.0, line.intercept + line.slope * top)))


def _search_alone(group: DeviceGroup, limits: MemoryLimits) -> int:
    """Return the answer of a search from batch 1 on; batch 1, which no program covers, fits if 2 does."""
    fits, two = group.replays.fits(limits), FIT_BATCHES[0]
    return scan_islands(
        lambda batch: fits(two if batch == 1 and fits(two) else batch), 0, group.replays.limit
    )


def _scan(group: DeviceGroup, limits: MemoryLimits) -> int:
    """Return the largest batch above the boundary, within the reach of a search from batch 1 on."""
    best = group.largest[limits]
    return scan_islands(group.replays.fits(limits), best, group.replays.limit) if best else 0


def _sample(groups: Sequence[DeviceGroup]) -> list[tuple[DeviceGroup, MemoryLimits]]:
    """Return GPUs evenly from the smallest boundary to the largest; none where sizes are random."""
    cards = [(group, limits) for group in groups for limits in group.largest]
    cards = [(group, limits) for group, limits in cards if not group.replays.is_random()]
    cards.sort(key=lambda card: card[0].largest[card[1]])
    last = len(cards) - 1
    places = {round(last * step / (SAMPLE - 1)) for step in range(SAMPLE)} if cards else set()
    return [cards[place] for place in sorted(places)]


def _fit(
    group: DeviceGroup, budget: Budget, requested: int | None, multiple_of: int, *, is_one_of_few: bool
) -> DeviceFit:
    search = group.search(budget.limits, multiple_of, is_one_of_few=is_one_of_few)
    replays = group.replays
    batch = requested or search.largest or 1
    outcome = replays.outcome(batch, budget.limits)
    limits = unlimited(budget.limits) if outcome is Outcome.DOES_NOT_FIT else budget.limits
    peak_bytes = replays.peak_reserved_bytes(batch, limits)
    return DeviceFit(
        budget,
        search.largest,
        batch,
        outcome,
        process_bytes(budget, peak_bytes),
        upper_process_bytes(budget, peak_bytes),
        search.comfortable,
    )
