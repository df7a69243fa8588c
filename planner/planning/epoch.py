"""An epoch whose last batch is smaller, from traces whose batches are all of one size.

A smaller batch asks for other blocks. Those that it cuts out of cached memory are missing to the full batch
after it, which may need new segments, so that the reserved peak of two epochs can lie above that of any
number of full batches. Such a loop is put together from the steps of a trace at the batch size and one at
that of the last batch: full steps, the smaller one, and a full one, as the next epoch begins.

What lives from one batch to the next (inputs, output, loss, gradients, optimizer state) is the same at all
batch sizes up to its size: it is known by how many batches before it was born, by its category, and by its
module, or where its size does not depend on the batch size, by that.
"""

from collections.abc import Hashable, Iterator

from msgspec import Struct
from msgspec.structs import replace

from planner.errors import ModelError, UsageError
from planner.jobs import Job, Mode
from planner.program import (
    LARGEST_BATCH,
    Alloc,
    Category,
    ConvWorkspace,
    Event,
    Free,
    LowerBound,
    Phase,
    PhaseStart,
    ProgramSet,
    Site,
    Target,
    TensorProvenance,
    Trace,
    TraceSource,
)

_FIXED = frozenset((Category.GRADIENT, Category.OPTIMIZER, Category.PARAMETER))  # as large for any batch size

_Order = tuple[tuple[int, bool], ...]  # steps of a trace, from 1, and whether the batch is the smaller one


def last_batch_size(job: Job, batch: int) -> int:
    """Samples in the last batch of an epoch; 0 where all batches are full."""
    return job.dataset_size % batch if 0 < batch <= job.dataset_size else 0


def max_useful_batch(job: Job) -> int:
    """Return the largest batch size worth asking for: no batch has more samples than the epoch."""
    return min(LARGEST_BATCH, job.dataset_size or LARGEST_BATCH)


def check_batch(job: Job, batch: int) -> None:
    """Raise UsageError for a batch that no epoch ever fills."""
    if job.dataset_size and batch > job.dataset_size:
        raise UsageError(
            f"--batch {batch} and --dataset-size {job.dataset_size}: no batch is ever full; "
            f"give at most --batch {job.dataset_size}"
        )


def with_last_batch(job: Job, batch: int, source: TraceSource) -> Trace:
    """Return the trace of the job's loop at this batch size, with the smaller batch where an epoch ends with
    one.

    Its notes tell what was played. A model that cannot run the smaller batch, or that goes through its steps
    in another way there, is told of and played without. Raises the errors of the source at `batch`.
    """
    full, last = source(batch), last_batch_size(job, batch)
    if not job.dataset_size:
        return full
    count = f"an epoch of {job.dataset_size:,} samples"
    if not last:
        return _noted(full, f"{count} has full batches alone")
    ends = f"{count} ends with a batch of {last:,}"
    try:
        smaller = source(last)
    except ModelError as error:
        return _noted(full, f"{ends}, which is not counted, since the model fails there: {error}")
    for order in _orders(job, job.dataset_size // batch):
        joined = _Stitcher(full, smaller, batch, last).play(order)
        if joined is not None:
            before = next(number for number, (_, is_smaller) in enumerate(order) if is_smaller)
            steps = f"{before} step" + "s" * (before > 1)
            what = "its step" if job.accumulate > 1 else "it"
            return _noted(joined, f"{ends}; {what} comes after {steps} of full batches and before one more")
    return _noted(full, f"{ends}, which is not counted, since the model goes another way there")


class EpochPrograms(Struct, frozen=True):
    """The traces of a job with the smaller batch that its epochs end with."""

    job: Job
    programs: ProgramSet

    def trace(self, batch: int, target: Target) -> Trace:
        """Return the trace as `with_last_batch` stitches it."""
        return with_last_batch(self.job, batch, lambda size: self.programs.trace(size, target))

    def key(self, batch: int, target: Target) -> Hashable:
        """Return the keys of both batch sizes; None where one has none, or the model fails there."""
        full, last = self.programs.key(batch, target), last_batch_size(self.job, batch)
        if not last:
            return full
        try:
            smaller = self.programs.key(last, target)
        except ModelError:
            return None
        return None if full is None or smaller is None else (full, smaller)

    def bound(self, target: Target) -> LowerBound | None:
        """Return that of full batches."""
        return self.programs.bound(target)


def _noted(trace: Trace, note: str) -> Trace:
    return replace(trace, notes=(*trace.notes, note))


def _orders(job: Job, full_batches: int) -> Iterator[_Order]:
    """Ways to play an epoch and the beginning of the next; the last one repeats no step."""
    # The evaluation stands before the last step that is traced, and a forward pass that is the last is kept
    # for a backward pass: such a step is played once, at the end.
    is_last_special = job.evaluate or job.mode is Mode.FORWARD
    usual = job.steps - 1 if is_last_special else job.steps
    before = max(1, min(full_batches // job.accumulate, job.steps))
    if usual > 1:  # the first step is like no other
        opening = [(min(step, usual), False) for step in range(1, before + 1)]
        after = job.steps if is_last_special else min(before + 2, usual)
        yield (*opening, (min(before + 1, usual), True), (after, False))
    if job.steps > 2:
        opening = [(step, False) for step in range(1, job.steps - 1)]
        yield (*opening, (job.steps - 1, True), (job.steps, False))


class _Segment(Struct, frozen=True):
    """Events from one batch's copying to the next one's; the first stretch is the set-up."""

    step: int
    events: tuple[Event, ...]


class _BlockKey(Struct, frozen=True):
    """The key of a block that outlives its stretch, apart from when it was born."""

    category: Category
    of: str | int  # its module, or its size in bytes where that does not depend on the batch size
    number: int  # among such blocks of the stretch


class _Parted(Struct, frozen=True):
    """A trace as stretches, and its blocks that outlive theirs."""

    trace: Trace
    batch: int
    stretches: tuple[_Segment, ...]
    live_across: dict[int, tuple[int, _BlockKey]]  # with the index of the stretch that they were born in

    def kinds(self, index: int) -> list[_BlockKey]:
        """Return what outlives a stretch, by birth."""
        return [kind for born, kind in self.live_across.values() if born == index]

    def of_step(self, step: int) -> list[int]:
        """Return the stretches of a step, by index."""
        return [index for index, stretch in enumerate(self.stretches) if stretch.step == step]


def _part(trace: Trace, batch: int) -> _Parted:
    stretches: list[_Segment] = []
    events: list[Event] = []
    step = 0
    for event in trace.events:
        if isinstance(event, PhaseStart) and (event.phase is Phase.INPUTS or event.step > step):
            stretches.append(_Segment(step, tuple(events)))
            events, step = [], event.step
        if not isinstance(event, PhaseStart) or event.phase is not Phase.END:
            events.append(event)
    stretches.append(_Segment(step, tuple(events)))
    live_across: dict[int, tuple[int, _BlockKey]] = {}
    for index, stretch in enumerate(stretches):
        gone = {event.block for event in stretch.events if isinstance(event, Free)}
        counts: dict[tuple[Category, str | int], int] = {}
        for event in stretch.events:
            if isinstance(event, Alloc) and event.block not in gone:
                is_fixed = event.category in _FIXED
                of = event.size_bytes if is_fixed else trace.sites[event.site].module
                key = event.category, of
                live_across[event.block] = index, _BlockKey(*key, counts.get(key, 0))
                counts[key] = counts.get(key, 0) + 1
    return _Parted(trace, batch, tuple(stretches), live_across)


def _match(kind: _BlockKey, ours: list[_BlockKey], theirs: list[_BlockKey]) -> _BlockKey:
    """Return the counterpart of a block in another trace, where those of its category that differ are equally
    many.

    The gradient of one sample may be a view of a larger block, where that of several is a sum of its own.
    """
    left = [one for one in ours if one.category is kind.category and one not in theirs]
    others = [one for one in theirs if one.category is kind.category and one not in ours]
    return others[left.index(kind)] if kind in left and len(left) == len(others) else kind


class _Stitcher:
    """Puts stretches of two traces one after another; one player makes one trace."""

    def __init__(self, full: Trace, smaller: Trace, batch: int, last: int) -> None:
        self._full, self._smaller = _part(full, batch), _part(smaller, last)
        self._events: list[Event] = []
        self._details: list[TensorProvenance] = []
        self._asked: list[ConvWorkspace] = []
        self._sites: dict[Site, int] = {}
        self._alive: dict[tuple[int, _BlockKey], int] = {}  # by the stretch of the new trace
        self._played: list[list[_BlockKey]] = []  # what outlived each stretch
        self._born = 0

    def play(self, order: _Order) -> Trace | None:
        """Return the steps in this order, after the set-up; None where a step cannot stand after the one
        before.
        """
        full, smaller = self._full, self._smaller
        steps = [stretch.step for stretch in full.stretches]
        if steps != [stretch.step for stretch in smaller.stretches] or max(steps) < max(s for s, _ in order):
            return None
        plan = [(full, index, 0) for index in full.of_step(0)]
        for number, (step, is_smaller) in enumerate(order, 1):
            stretches = full.of_step(step)
            for place, index in enumerate(stretches):
                is_last = is_smaller and place == len(stretches) - 1
                plan.append((smaller if is_last else full, index, number))
        for place, (parted, index, number) in enumerate(plan):
            if not self._play(parted, index, place, number):
                return None
        if isinstance(full.trace.events[-1], PhaseStart) and full.trace.events[-1].phase is Phase.END:
            self._events.append(PhaseStart(len(order), Phase.END))
        return self._trace()

    def _play(self, parted: _Parted, index: int, place: int, step: int) -> bool:
        """Return one stretch; False where a block dies that is not there."""
        names: dict[int, int] = {}
        self._played.append(parted.kinds(index))
        sites = [self._sites.setdefault(site, len(self._sites)) for site in parted.trace.sites]
        for event in parted.stretches[index].events:
            if isinstance(event, Alloc):
                names[event.block] = number = self._born
                self._born += 1
                site = sites[event.site]
                self._events.append(Alloc(number, event.size_bytes, event.category, site, event.may_fail))
                if event.block in parted.live_across:
                    self._alive[place, parted.live_across[event.block][1]] = number
            elif isinstance(event, Free):
                block = names.get(event.block)
                if block is None:
                    block = self._live_across_key(parted, event.block, index, place)
                if block is None:
                    return False
                self._events.append(Free(block))
            else:
                self._events.append(PhaseStart(step, event.phase))
        self._details += [
            replace(detail, block=names[detail.block])
            for detail in parted.trace.provenance
            if detail.block in names
        ]
        self._asked += [
            replace(row, block=names[row.block]) for row in parted.trace.conv_workspaces if row.block in names
        ]
        return True

    def _live_across_key(self, parted: _Parted, block: int, index: int, place: int) -> int | None:
        """Return the block that here is what `block` was in its trace."""
        born, kind = parted.live_across[block]
        there = 0 if born == 0 else place - (index - born)
        if (there, kind) not in self._alive and 0 <= there < len(self._played):
            kind = _match(kind, parted.kinds(born), self._played[there])
        return self._alive.pop((there, kind), None)

    def _trace(self) -> Trace:
        full, smaller = self._full.trace, self._smaller.trace
        return Trace(
            tuple(self._events),
            tuple(self._sites),
            self._full.batch,
            tuple(sorted({*full.unknown_ops, *smaller.unknown_ops})),
            (*full.notes, *(note for note in smaller.notes if note not in full.notes)),
            tuple(self._details),
            tuple(self._asked),
            full.growth_sources,
        )
