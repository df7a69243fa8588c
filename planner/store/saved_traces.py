"""The traces of a saved file, without torch: of a trace that was saved, or of loops.

Loops (`stored_loop`) tell the very trace of a batch size on a GPU of a compute capability that the file has.
Where they know nothing of a kernel there, it gets what it takes at a batch size nearby, and a note says so.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from planner.errors import DataFileError, UsageError
from planner.jobs import Job, job_from_json
from planner.program import (
    Alloc,
    Answers,
    Capability,
    Floor,
    StoredLoop,
    Target,
    Trace,
    Written,
    least_bytes,
    loop_from_json,
    tried,
    written,
)
from planner.store.codec import LARGEST_NUMBER, Saved, load_saved

_TRIED = 16  # below what is asked for: two doublings, or all
_BROKEN = (UsageError, LookupError, TypeError, ValueError, AttributeError)


class SavedTraces(Protocol):
    """Traces for a batch size on a GPU of one kind; `planner.planning.fleet.Traces` as well."""

    def at(self, batch: int, chip: Target) -> Trace:
        """The whole trace. Raises UsageError for a batch size that the file says nothing about."""

    def kin(self, batch: int, chip: Target) -> Hashable:
        """Equal for kinds of GPUs that run the same events; None where only the traces themselves tell."""

    def floor(self, chip: Target) -> Floor:
        """What tensors take at the least."""

    @property
    def is_any_batch(self) -> bool:
        """Whether it holds for more than one batch size."""


@dataclass(frozen=True, slots=True)
class SavedJob:
    """What a saved file says."""

    job: Job
    batch: int
    capability: Capability  # of the GPU that was planned for
    traces: SavedTraces


def open_saved(path: Path) -> SavedJob:
    """The job of a file that was saved, with its traces. Raises DataFileError."""
    saved = load_saved(path)
    about = saved.about
    try:
        job = job_from_json(about["job"])
        batch = about["batch"]
        major, minor = about["capability"]
        if not all(type(number) is int for number in (batch, major, minor)):
            raise TypeError("batch and capability are whole numbers")
        multiprocessors = about["multiprocessors"] if saved.loops else 0
        if type(multiprocessors) is not int or abs(multiprocessors) > LARGEST_NUMBER:
            raise TypeError("multiprocessors are a whole number")
    except _BROKEN as error:
        raise DataFileError(
            f"{path}: broken job of a trace: {type(error).__name__}: {error}; trace anew"
        ) from error
    capability = (major, minor)
    if saved.loops:
        loops = _Loops(path, saved, Target(capability, multiprocessors))
        loops.check()
        return SavedJob(job, batch, capability, loops)
    return SavedJob(job, batch, capability, _Whole(path, saved.traces[0], capability))


def _noted(trace: Trace, traced: Capability, chip: Target) -> Trace:
    """With a note where the GPU is none of those that the trace is of."""
    if traced == chip.capability:
        return trace
    note = f"traced for compute capability {traced[0]}.{traced[1]}; this GPU's kernels may take other memory"
    return replace(trace, notes=(*trace.notes, note))


@dataclass(frozen=True, slots=True)
class _Whole:
    """One trace, which for other batch sizes is as good as its lines are."""

    path: Path
    trace: Trace
    capability: Capability

    @property
    def is_any_batch(self) -> bool:
        return self.trace.is_affine

    def at(self, batch: int, chip: Target) -> Trace:
        if not self.trace.is_affine and (batch,) != self.trace.batches:
            only = f"this trace holds for batch {self.trace.batches[0]} only"
            raise UsageError(f"{self.path}: {only}; trace batch {batch} anew")
        return _noted(_at(self.trace, batch), self.capability, chip)

    def kin(self, batch: int, chip: Target) -> Hashable:
        return None

    def floor(self, chip: Target) -> Floor:
        return least_bytes(self.trace.events) if self.trace.is_affine else lambda batch: 0


def _at(trace: Trace, batch: int) -> Trace:
    """An affine trace as if taken at one batch size."""
    if not trace.is_affine:
        return trace
    events = tuple(
        replace(event, fixed_bytes=event.bytes_at(batch), per_sample_bytes=0)
        if isinstance(event, Alloc)
        else event
        for event in trace.events
    )
    return replace(trace, events=events, batches=(batch,))


Told = tuple[StoredLoop, Answers, tuple[str, ...]]  # with notes


@dataclass(slots=True)
class _Loops:
    """Loops of several compute capabilities; the first of each holds for more than one batch size."""

    path: Path
    saved: Saved
    chip: Target  # that was planned for
    _known: dict[Capability, tuple[StoredLoop, ...]] = field(default_factory=dict)

    @property
    def is_any_batch(self) -> bool:
        return True

    def check(self) -> None:
        """Raise DataFileError where there is no whole loop of the GPU that was planned for."""
        if not self._of(self.chip.capability):
            raise self._broken("none is of the GPU that was planned for")

    def at(self, batch: int, chip: Target) -> Trace:
        loop, answers, notes = self._told(batch, chip)
        trace = loop.told(batch, answers)
        trace = _noted(trace, self._capability(chip), chip)
        return replace(trace, notes=(*trace.notes, *notes))

    def kin(self, batch: int, chip: Target) -> Hashable:
        loop, answers, notes = self._told(batch, chip)
        return id(loop.own), loop.kernels, loop.blas_bytes, answers, notes

    def floor(self, chip: Target) -> Floor:
        return least_bytes(self._of(self._capability(chip))[0].own.events)

    def _capability(self, chip: Target) -> Capability:
        return chip.capability if self._of(chip.capability) else self.chip.capability

    def _told(self, batch: int, chip: Target) -> Told:
        """The loop that answers for a batch size on a GPU, and what its kernels take there."""
        loops = self._of(self._capability(chip))
        for loop in loops:
            answers = loop.answers(batch, chip.sm_count)
            if answers is not None:
                return loop, self._checked(answers), ()
        return self._nearby(loops[0], batch, chip)

    def _nearby(self, loop: StoredLoop, batch: int, chip: Target) -> Told:
        """The loop with kernels that take what they do nearby, where it does not know better."""
        inside = min(max(batch, loop.first), loop.last)
        others: set[tuple[int, int]] = set()
        answers = []
        for cases in loop.cases:
            places = _places(loop, inside, chip.sm_count, self.chip.sm_count)
            tries = ((place, written(cases, *place)) for place in places)
            found = next(((place, steps) for place, steps in tries if steps is not None), None)
            if found is None:
                raise UsageError(f"{self.path}: nothing is known of batch {batch}; trace it anew")
            others.add(found[0])
            answers.append(found[1])
        notes = _notes(others - {(batch, chip.sm_count)}, batch, chip)
        if batch > loop.last:
            notes = (*notes, f"the file's loop was held against runs up to batch {loop.last} only")
        return loop, self._checked(tuple(answers)), notes

    def _checked(self, answers: Answers) -> Answers:
        if any(_largest(steps) > LARGEST_NUMBER for steps in answers):
            raise self._broken("a kernel takes more than any GPU has")
        return answers

    def _of(self, capability: Capability) -> tuple[StoredLoop, ...]:
        """The loops for such GPUs; none where the file has none."""
        if capability not in self._known:
            try:
                self._known[capability] = tuple(_read(self.saved, capability))
            except _BROKEN as error:
                raise self._broken(f"{type(error).__name__}: {str(error)[:200]}") from error
        return self._known[capability]

    def _broken(self, why: str) -> DataFileError:
        return DataFileError(f"{self.path}: broken loops of a trace: {why}; trace anew")


def _read(saved: Saved, capability: Capability) -> Iterator[StoredLoop]:
    name = ".".join(map(str, capability))
    for own, said in zip(saved.traces, saved.loops, strict=True):
        if name in said["chips"]:
            yield loop_from_json(own, said, capability)


def _places(loop: StoredLoop, batch: int, multiprocessors: int, planned: int) -> Iterator[tuple[int, int]]:
    """Batch sizes and multiprocessors at which a kernel may be known, the nearest first."""
    below = [size for size in tried(loop.first, loop.last) if size < batch]
    sizes = [batch, *reversed(below[-_TRIED:]), loop.first]
    return ((size, count) for size in sizes for count in (multiprocessors, planned))


def _largest(steps: Written) -> int:
    return max((size for _, size in steps), default=0)


def _notes(others: set[tuple[int, int]], batch: int, chip: Target) -> tuple[str, ...]:
    if not others:
        return ()
    at = ", ".join(f"batch {size} on {count} multiprocessors" for size, count in sorted(others))
    here = f"batch {batch} on {chip.sm_count} multiprocessors"
    return (f"the file does not know what all kernels take at {here}; some are given what they take at {at}",)
