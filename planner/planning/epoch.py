"""An epoch whose last batch is smaller, from traces whose batches are all of one size.

A smaller batch asks for other blocks. Those that it cuts out of cached memory are missing to the full batch
after it, which may need new segments, so that the reserved peak of two epochs can lie above that of any
number of full batches. Such a loop is put together from the steps of a trace at the batch size and one at
that of the last batch: full steps, the smaller one, and a full one, as the next epoch begins.

Both traces are of one program, so that what lives from one batch to the next is the same variable in both.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from planner.errors import ModelError, UsageError
from planner.jobs import Job, Mode
from planner.planning.segments import Variable, find_variables, split_segments
from planner.program import (
    LARGEST_BATCH,
    Alloc,
    BatchSizes,
    Convolution,
    ConvWorkspace,
    Event,
    LowerBound,
    Phase,
    PhaseStart,
    ProgramSet,
    Target,
    TensorProvenance,
    Trace,
    TraceSource,
)

_Order = tuple[tuple[int, bool], ...]  # steps of a trace, from 1, and whether the batch is the smaller one
_Row = TypeVar("_Row", TensorProvenance, ConvWorkspace)


def last_batch_size(job: Job, batch: int) -> int:
    """Samples in the last batch of an epoch; 0 where all batches are full."""
    return job.dataset_size % batch if 0 < batch <= job.dataset_size else 0


def steps_of_epoch(job: Job, batch: int) -> int:
    """Return the optimizer's steps in an epoch; 0 where its samples are not known."""
    return -(-job.dataset_size // (batch * job.accumulate))


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

    Its notes describe the epoch. A model that cannot run the smaller batch, or that goes through its steps
    in another way there, gets a note and is left out. Raises the errors of the source at `batch`.
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
        joined = _stitch(full, smaller, order)
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

    def batch_sizes(self, target: Target) -> BatchSizes:
        """Return those of full batches."""
        return self.programs.batch_sizes(target)


def _noted(trace: Trace, note: str) -> Trace:
    return replace(trace, notes=(*trace.notes, note))


def _orders(job: Job, full_batches: int) -> Iterator[_Order]:
    """Yield the ways to play an epoch and the beginning of the next; the last one repeats no step."""
    # The evaluation stands before the last step that is traced, and the last forward pass saves tensors
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


def _stitch(full: Trace, smaller: Trace, order: _Order) -> Trace | None:
    """Return the set-up and the steps in this order; None where one frees a block that is not there."""
    traces = full, smaller
    segments = [split_segments(trace.events) for trace in traces]
    variables = [find_variables(parts) for parts in segments]
    steps = [segment.step for segment in segments[0]]
    if steps != [segment.step for segment in segments[1]] or steps[-1] < max(step for step, _ in order):
        return None
    sites = {site: index for index, site in enumerate(dict.fromkeys((*full.sites, *smaller.sites)))}
    live: dict[tuple[int, Variable], int] = {}  # blocks by their variable, of a segment of the new trace
    events: list[Event] = []
    provenance: list[TensorProvenance] = []
    conv_workspaces: list[ConvWorkspace] = []
    convolutions: dict[int, Convolution] = {}
    count = 0
    for place, (which, index, step) in enumerate(_plan(steps, order)):
        made: dict[int, int] = {}
        for event in segments[which][index].events:
            if isinstance(event, PhaseStart):
                events.append(PhaseStart(step, event.phase))
            elif isinstance(event, Alloc):
                made[event.block] = count
                site = sites[traces[which].sites[event.site]]
                events.append(replace(event, block=count, site=site))
                if event.block in variables[which]:
                    live[place, variables[which][event.block][1]] = count
                count += 1
            else:
                block = made.get(event.block)
                if block is None:
                    born, number = variables[which][event.block]
                    block = live.pop((born and place - index + born, number), None)
                if block is None:
                    return None
                events.append(replace(event, block=block))
        provenance += _renumber(traces[which].provenance, made)
        conv_workspaces += _renumber(traces[which].conv_workspaces, made)
        of_blocks = traces[which].convolutions
        convolutions.update((new, of_blocks[old]) for old, new in made.items() if old in of_blocks)
    if full.events[-1] == PhaseStart(steps[-1], Phase.END):
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


def _plan(steps: Sequence[int], order: _Order) -> Iterator[tuple[int, int, int]]:
    """Yield the segments of the set-up and of an order: of which trace, its index there, its step here."""
    for number, (step, is_smaller) in enumerate(((0, False), *order)):
        indices = [index for index, one in enumerate(steps) if one == step]
        for index in indices:
            yield int(is_smaller and index == indices[-1]), index, number
