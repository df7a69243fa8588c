"""A loop in the form in which it is stored: the rules' answers as terms, the whole held against a run."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

from planner.capture.models.registry import construct_model, find_constructor
from planner.capture.symbolic.builder import Loops, OnProgress, UnsteadyError
from planner.capture.symbolic.capability_guards import Watched
from planner.capture.symbolic.fit_lines import find_loop
from planner.capture.symbolic.kernel_calls import Line, Run, Shape
from planner.capture.symbolic.recast import Loop, differs
from planner.capture.symbolic.sym_int import Number, Record
from planner.capture.symbolic.sym_tensor import Sketch, UnknownToSketchesError, ask
from planner.capture.workspaces.registry import rule_of
from planner.errors import ModelError
from planner.jobs import Job
from planner.program import (
    FROM_CHANCE,
    Alloc,
    Case,
    Category,
    Event,
    Free,
    Kernel,
    StoredLoop,
    Target,
    tried,
    work_out,
    workspace_bytes,
)

# A batch that takes so much beside the model is run to confirm a loop: about as much as the largest servers'
# eight GPUs have together, or, where torch itself cannot count so far or takes other ways for so many,
# some GPUs, or smaller ones down to one of some years ago.
CONFIRMED_BYTES = (2**41, 2**39, 2**36, 2**35, 2**34, 2**33)
NEAR = (
    32  # a loop that holds at one of these and not at the one before is followed this near to where it ends
)
ALONE_BYTES = 2**30
LARGEST_BATCH = 2**24  # as of a search, which the tracer does not know
FIRST_BATCH = 2  # at batch 1 torch takes shortcuts, so no line goes through it
MOST_CASES = 128  # of one kind of call; with more of them, batch sizes in between are traced
# Of GPUs from the smallest to the largest, about; a chip in between mostly goes the same way.
MULTIPROCESSORS = (14, 20, 24, 28, 34, 40, 46, 58, 68, 72, 80, 84, 108, 128, 132, 142, 148, 170, 188)


def _find_loops(
    loops: Loops, chip: Target, confirmed: dict[int, int], run: Callable[[int, Target], StoredLoop]
) -> tuple[StoredLoop, ...]:
    """`run` takes the run at batch 1; `confirmed` remembers for each loop, by identity, up to which batch
    size it was found to hold.
    """
    try:
        loop = loops.of(chip)
    except UnsteadyError:
        return ()
    if any(FROM_CHANCE in note for note in loop.trace.notes):
        return ()  # shapes that depend on values are on no line
    if id(loop) not in confirmed:
        confirmed[id(loop)] = _confirmed(loops, loop, chip)
    last = confirmed[id(loop)]
    if not last:
        return ()
    found = _stored(loop, chip, FIRST_BATCH, last)
    return (found, run(1, chip)) if _is_large(loop) else (found,)


def _confirmed(loops: Loops, loop: Loop, chip: Target) -> int:
    """The largest batch size tried at which a run does what the loop says; 0 for a loop that is wrong."""
    other = 0  # a batch size at which a run does something else
    for most_bytes in CONFIRMED_BYTES:
        batch = _batch_taking(loop, most_bytes)
        with suppress(ModelError):  # too large for torch itself
            if not loops.confirm(batch, chip):
                return _followed(loops, chip, batch, other)
            other = batch
    return 0


def _followed(loops: Loops, chip: Target, batch: int, other: int) -> int:
    """A batch size at which the loop holds, near the first one at which it does not, between these two."""
    while other - batch > max(1, batch // NEAR):
        middle = (batch + other) // 2
        if loops.confirm(middle, chip):
            other = middle
        else:
            batch = middle
    return batch


@dataclass(frozen=True, slots=True)
class Keeper:
    """Takes a job's traces in the form in which they are kept."""

    runs: Loops
    _confirmed: dict[int, int] = field(default_factory=dict)
    _alone: dict[int, list[tuple[Watched, Run]]] = field(default_factory=dict)  # by batch size

    def loops(self, chip: Target) -> tuple[StoredLoop, ...]:
        """The job's loop on GPUs of this compute capability, and a large job's run at batch 1, since small
        cards ask for that; none where the job has no loop that holds.
        """
        return _find_loops(self.runs, chip, self._confirmed, self.run)

    def run(self, batch: int, chip: Target) -> StoredLoop:
        """A run at one batch size, as a loop that holds for no other. One run serves all GPUs that answer
        what it asked as the one did that it is of. Raises the errors of a trace.
        """
        known = self._alone.setdefault(batch, [])
        for watched, run in known:
            found = _run_elsewhere(self.runs, run, chip) if watched.agrees(chip.capability) else None
            if found is not None:
                return found
        watched = Watched(chip.capability)
        run = self.runs.run(batch, chip, watched)
        known.append((watched, run))
        return _as_loop(self.runs, run, chip)


def open_keeper(job: Job, tell: OnProgress) -> Keeper:
    """Imports the library of the job's model. Raises UsageError or ModelError."""
    return open_keeper_of(job, find_constructor(job), tell)


def open_keeper_of(job: Job, constructor: Callable[..., Any], tell: OnProgress) -> Keeper:
    """The same for a job whose model this makes."""
    return Keeper(Loops(job, lambda job: construct_model(job, constructor), tell))


def _as_loop(loops: Loops, run: Run, chip: Target) -> StoredLoop:
    (batch,) = run.trace.batches
    with suppress(UnsteadyError):
        found = _stored(_still(run, loops), chip, batch, batch)
        again = found.at(batch, chip.sm_count)
        if again is not None and not differs(again, run.trace):
            return found
    # Its kernels cannot be told from the rest, so it holds for these multiprocessors only.
    return StoredLoop(run.trace, (), (), 0, batch, batch)


def _run_elsewhere(loops: Loops, run: Run, chip: Target) -> StoredLoop | None:
    """The run as it goes on another GPU; None where its kernels cannot be told from the rest."""
    (batch,) = run.trace.batches
    try:
        still = _still(run, loops)
    except UnsteadyError:
        return None
    found = _stored(still, chip, batch, batch)
    again = found.at(batch, chip.sm_count)
    same = again is not None and not differs(again, still.at(batch, loops.equip(chip)))
    return found if same else None


def _still(run: Run, loops: Loops) -> Loop:
    """The loop through one run alone, which holds at its batch size."""
    (batch,) = run.trace.batches
    moved = Run(replace(run.trace, batches=(batch + 1,)), run.calls)
    return find_loop(run, moved, loops.job.cublas_workspace_config)


def _batch_taking(loop: Loop, most_bytes: int) -> int:
    """A batch size at which what grows with it takes so much at once, or more."""
    now = most = 0
    slopes: dict[int, int] = {}
    for event in loop.own:
        if isinstance(event, Alloc):
            slopes[event.block] = event.per_sample_bytes
            now += event.per_sample_bytes
            most = max(most, now)
        elif isinstance(event, Free):
            now -= slopes[event.block]
    return max(FIRST_BATCH + 2, min(most_bytes // max(most, 1) + 1, LARGEST_BATCH))


def _is_large(loop: Loop) -> bool:
    """Whether parameters or two samples take so much that somebody may ask for one sample alone."""
    fixed_bytes = sum(event.fixed_bytes for event in loop.own if _is_parameter(event))
    return fixed_bytes > ALONE_BYTES or _batch_taking(loop, ALONE_BYTES) <= FIRST_BATCH + 2


def _is_parameter(event: Event) -> TypeGuard[Alloc]:
    return isinstance(event, Alloc) and event.role is Category.PARAMETER


def _stored(loop: Loop, chip: Target, first: int, last: int) -> StoredLoop:
    kernels = tuple(
        Kernel(kernel.kind, kernel.site, kernel.before, kernel.outputs, kernel.takes_blas)
        for kernel in loop.kernels
    )
    cases = tuple(tuple(_cases_known(*kind, chip, first, last)) for kind in loop.kinds)
    own = replace(loop.trace, events=loop.own, batches=(first, first + 1), details=())
    return StoredLoop(own, kernels, cases, workspace_bytes(chip.capability, loop.cublas_config), first, last)


def _cases_known(func: Any, args: Any, out: Any, chip: Target, first: int, last: int) -> list[Case]:
    """The cases; none for a rule that only a run can ask, so that the loop says nothing of any batch size."""
    try:
        return _cases(func, args, out, chip, first, last)
    except UnknownToSketchesError:
        return []


def _cases(func: Any, args: Any, out: Any, chip: Target, first: int, last: int) -> list[Case]:
    """What the rule of an operator answers to these batch sizes, as far as they are tried."""
    rule = rule_of(func)
    if rule is None:
        return [Case(first, last, (), (), ())]
    found: list[Case] = []
    for batch in tried(first, last):
        if found and found[-1].low <= batch <= found[-1].high and not found[-1].guards:
            continue
        for count in (chip.sm_count, *MULTIPROCESSORS):
            if len(found) == MOST_CASES:
                return found
            if count != chip.sm_count and not any(case.asks_multiprocessors for case in found):
                break
            if all(work_out(case, batch, count) is None for case in reversed(found)):
                record = Record(batch)
                asked = Target(chip.capability, count)
                found.append(ask(rule, _numbered(args, record), _numbered(out, record), asked, record))
    return found


def _numbered(value: Any, record: Record) -> Any:
    if isinstance(value, Line):
        number = value.fixed + value.slope * record.batch
        return Number(record, number, (value.fixed, value.slope))
    if isinstance(value, Shape):
        return Sketch(_numbered(value.sizes, record), _numbered(value.strides, record), value.dtype)
    if isinstance(value, tuple):
        return tuple(_numbered(item, record) for item in value)
    return value
