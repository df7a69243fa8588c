"""Build the trace of an epoch whose last batch is smaller.

It is built from two traces of equal batches. A smaller batch requests blocks of other sizes. They split
cached blocks that the full batch after it needs, which may then allocate new segments. So the reserved peak
of two epochs can exceed the reserved peak of any number of full batches. Such a loop is put together from the
steps of a trace at the batch size and of a trace at the size of the last batch: full steps, the smaller step,
and a full step, as the next epoch begins.

Both traces are of one program, so that a block that outlives its batch is the same variable in both.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from planner.errors import ModelError, UsageError
from planner.jobs import Job, Mode
from planner.program import (
    LARGEST_BATCH,
    Alloc,
    BatchSizes,
    Convolution,
    ConvWorkspace,
    Event,
    Free,
    Joiner,
    LowerBound,
    NotJoinedError,
    Phase,
    PhaseStart,
    Piece,
    ProgramSet,
    Target,
    TensorProvenance,
    Trace,
    TraceSource,
    cut_trace,
)

_Order = tuple[tuple[int, bool], ...]  # traced steps, counted from 1, and whether each has the smaller batch
_Row = TypeVar("_Row", TensorProvenance, ConvWorkspace)


def last_batch_size(job: Job, batch: int) -> int:
    """Return the size of an epoch's smaller last batch, or 0 if there is none.

    There is none if the last batch is full, if the size of the epoch is unknown, or if a full batch has more
    samples than the epoch.
    """
    return job.samples.dataset_size % batch if 0 < batch <= job.samples.dataset_size else 0


def steps_of_epoch(job: Job, batch: int) -> int:
    """Return the number of optimizer steps in an epoch, or 0 if its size is unknown."""
    return -(-job.samples.dataset_size // (batch * job.loop.accumulate))


def max_useful_batch(job: Job) -> int:
    """Return the number of samples of an epoch, or `LARGEST_BATCH` if it is unknown or larger."""
    return min(LARGEST_BATCH, job.samples.dataset_size or LARGEST_BATCH)


def check_batch(job: Job, batch: int) -> None:
    """Raise UsageError if a batch has more samples than an epoch."""
    if job.samples.dataset_size and batch > job.samples.dataset_size:
        raise UsageError(
            f"--batch {batch} and --dataset-size {job.samples.dataset_size}: no batch is ever full; "
            f"give at most --batch {job.samples.dataset_size}"
        )


def with_last_batch(job: Job, batch: int, source: TraceSource) -> Trace:
    """Return the trace of a job's loop, including the last batch of an epoch if it is smaller.

    The notes describe the epoch if its size is known. If the model cannot run the smaller batch, or its steps
    differ there, the smaller batch is left out and a note says so. Raises the errors of the source at
    `batch`.
    """
    full, last = source(batch), last_batch_size(job, batch)
    if not job.samples.dataset_size:
        return full
    count = f"an epoch of {job.samples.dataset_size:,} samples"
    if not last:
        return _noted(full, f"{count} has full batches alone")
    ends = f"{count} ends with a batch of {last:,}"
    try:
        smaller = source(last)
    except ModelError as error:
        return _noted(full, f"{ends}, which is not counted, since the model fails there: {error}")
    traced = max(event.step for event in full.events if isinstance(event, PhaseStart))
    for order in _orders(job, traced, job.samples.dataset_size // batch):
        joined = _stitch(full, smaller, order)
        if joined is not None:
            before = next(number for number, (_, is_smaller) in enumerate(order) if is_smaller)
            steps = f"{before} step" + "s" * (before > 1)
            what = "its step" if job.loop.accumulate > 1 else "it"
            return _noted(joined, f"{ends}; {what} comes after {steps} of full batches and before one more")
    return _noted(full, f"{ends}, which is not counted, since the model goes another way there")


class EpochPrograms(Struct, frozen=True):
    """A program set whose traces include the smaller batch at the end of an epoch, if there is one."""

    job: Job
    programs: ProgramSet

    def trace(self, batch: int, target: Target) -> Trace:
        """Return the trace at a batch size, including the smaller batch at the end of an epoch."""
        return with_last_batch(self.job, batch, lambda size: self.programs.trace(size, target))

    def key(self, batch: int, target: Target) -> Hashable:
        """Return a key that two targets share if and only if their traces are equal, or None if unknown.

        The key is made of the keys of the full and the last batch size. It is None if either batch size has
        no key, or if the model fails at the smaller batch size.
        """
        full, last = self.programs.key(batch, target), last_batch_size(self.job, batch)
        if not last:
            return full
        try:
            smaller = self.programs.key(last, target)
        except ModelError:
            return None
        return None if full is None or smaller is None else (full, smaller)

    def bound(self, target: Target) -> LowerBound | None:
        """Return a function from the full batch size to a lower bound of the memory in bytes, or None.

        It is None if no bound exists. The smaller last batch is not counted.
        """
        return self.programs.bound(target)

    def batch_sizes(self, target: Target) -> BatchSizes:
        """Return the batch sizes that a search may try for full batches."""
        return self.programs.batch_sizes(target)


def _noted(trace: Trace, note: str) -> Trace:
    return replace(trace, notes=(*trace.notes, note))


def _orders(job: Job, steps: int, full_batches: int) -> Iterator[_Order]:
    """Yield orders of traced steps that represent an epoch, the preferred order first.

    Each ends with the step of the smaller batch and the first step of the next epoch. If the trace has at
    least three steps, the last sequence repeats no step. Nothing is yielded if the trace has too few steps.
    """
    # The evaluation comes before the last traced step, and the last forward pass saves tensors for a backward
    # pass: such a step is played once, at the end.
    is_last_special = job.loop.evaluate or job.loop.mode is Mode.FORWARD
    usual = steps - 1 if is_last_special else steps
    before = max(1, min(full_batches // job.loop.accumulate, steps))
    if usual > 1:  # the first step differs from all others
        opening = [(min(step, usual), False) for step in range(1, before + 1)]
        after = steps if is_last_special else min(before + 2, usual)
        yield (*opening, (min(before + 1, usual), True), (after, False))
    if steps > 2:
        opening = [(step, False) for step in range(1, steps - 1)]
        yield (*opening, (steps - 1, True), (steps, False))


def _stitch(full: Trace, smaller: Trace, order: _Order) -> Trace | None:
    """Return a trace joined from the steps in `order`, or None if the traces do not match.

    The set-up comes first. The traces do not match if their pieces differ or are too few, or if a step frees
    a block that is not allocated.
    """
    traces = full, smaller
    pieces = [cut_trace(trace) for trace in traces]
    if [*map(len, pieces[0])] != [*map(len, pieces[1])] or len(pieces[0]) <= max(step for step, _ in order):
        return None
    sites = {site: index for index, site in enumerate(dict.fromkeys((*full.sites, *smaller.sites)))}
    joiner, count = Joiner(), 0
    events: list[Event] = []
    numbers: dict[int, int] = {}  # in the new trace, of the joined blocks that are live
    provenance: list[TensorProvenance] = []
    conv_workspaces: list[ConvWorkspace] = []
    convolutions: dict[int, Convolution] = {}
    for step, which, piece in _plan(pieces, order):
        try:
            joined = joiner.join(piece, step)
        except NotJoinedError:
            return None
        made: dict[int, int] = {}
        for own, event in zip(piece.trace.events, joined.events, strict=True):
            if isinstance(event, Alloc) and isinstance(own, Alloc):
                made[own.block] = numbers[event.block] = count
                site = sites[traces[which].sites[event.site]]
                events.append(replace(event, block=count, site=site))
                count += 1
            elif isinstance(event, Free):
                events.append(replace(event, block=numbers.pop(event.block)))
            else:
                events.append(event)
        provenance += _renumber(traces[which].provenance, made)
        conv_workspaces += _renumber(traces[which].conv_workspaces, made)
        of_blocks = traces[which].convolutions
        convolutions.update((new, of_blocks[old]) for old, new in made.items() if old in of_blocks)
    if full.events[-1] == PhaseStart(len(pieces[0]) - 1, Phase.END):
        events.append(PhaseStart(step, Phase.END))
    return replace(
        full,
        events=tuple(events),
        sites=tuple(sites),
        unknown_ops=tuple(sorted({*full.unknown_ops, *smaller.unknown_ops})),
        notes=tuple(dict.fromkeys((*full.notes, *smaller.notes))),
        facts=full.facts | smaller.facts,
        provenance=tuple(provenance),
        conv_workspaces=tuple(conv_workspaces),
        convolutions=convolutions,
    )


def _renumber(rows: Iterable[_Row], blocks: Mapping[int, int]) -> Iterator[_Row]:
    return (replace(row, block=blocks[row.block]) for row in rows if row.block in blocks)


def _plan(pieces: Sequence[Sequence[Sequence[Piece]]], order: _Order) -> Iterator[tuple[int, int, Piece]]:
    """Yield the step, the source trace and the piece for each piece of the new trace.

    The step is of the new trace; the source trace is an index. Of a step with the smaller batch, only the
    last piece is from the smaller batch's trace.
    """
    for number, (step, is_smaller) in enumerate(((0, False), *order)):
        for place in range(len(pieces[0][step])):
            which = int(is_smaller and place == len(pieces[0][step]) - 1)
            yield number, which, pieces[which][step][place]
