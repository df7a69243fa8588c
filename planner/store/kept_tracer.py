"""A tracer that looks on shelves of kept traces first, and keeps what it has to take."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from planner._support.versions import installed_version, public_version
from planner.jobs import Job
from planner.planning import FIT_BATCHES
from planner.program import Answers, StoredLoop, Target, Trace
from planner.store.bundled_store import ShippedShelf
from planner.store.kept_traces import Found, Shelf, UserShelf


class Fresh(Protocol):
    """Takes traces with torch."""

    def loops(self, chip: Target) -> tuple[StoredLoop, ...]:
        """The job's loop where it has one, and what belongs beside it."""

    def run(self, batch: int, chip: Target) -> StoredLoop:
        """One batch size."""


@dataclass(frozen=True, slots=True)
class Shelves:
    """Where kept traces are looked for, in this order."""

    user: UserShelf
    shipped: ShippedShelf

    def completed(self, job: Job, complete: Callable[[Job], Job]) -> Job:
        """The job as its library completes it, which is asked, and kept, where no shelf knows."""
        known = self.user.completed(job) or self.shipped.completed(job)
        if known is not None:
            # No trace depends on these two.
            return replace(known, dataset_size=job.dataset_size, lengths=job.lengths)
        completed = complete(job)
        self.user.keep_completed(job, completed)
        return completed


@dataclass(slots=True)
class KeptTracer:
    """The job's traces from shelves; what none has is traced, and kept on the user's."""

    job: Job
    chip: Target
    shelves: Shelves
    start: Callable[[], Fresh]  # imports torch
    _known: list[Found] = field(default_factory=list)
    _fresh: Fresh | None = None
    _read: set[int] = field(default_factory=set)  # shelves whose loops are known
    _tried: bool = False  # whether a loop was looked for
    _taken: dict[int, Trace] = field(default_factory=dict)
    _notes: dict[str, str] = field(default_factory=dict)  # by the torch of the traces

    def __call__(self, batch: int) -> Trace:
        """The trace at this batch size. Raises the errors of a trace."""
        if batch not in self._taken:
            self._taken[batch] = self._from_known(batch) or self._from_shelves(batch) or self._traced(batch)
        return self._taken[batch]

    def answers(self, batch: int) -> tuple[StoredLoop, Answers] | None:
        """The loop that answers for a batch size, with what its kernels take; None where none is known."""
        for found in self._known:
            answers = found.loop.answers(batch, self.chip.sm_count)
            if answers is not None:
                return found.loop, answers
        return None

    def loop(self) -> StoredLoop | None:
        """The job's loop, where it has one. Raises the errors of a trace."""
        if self._known_loop() is None:
            self(FIT_BATCHES[0])
        return self._known_loop()

    def _known_loop(self) -> StoredLoop | None:
        loops = (found.loop for found in self._known if found.loop.last > found.loop.first)
        return next(loops, None)

    def beside(self, other: "KeptTracer") -> "KeptTracer":
        """The other, for GPUs of the same compute capability, with the loops that this one has read."""
        other._known = [found for found in self._known if found.loop.last > found.loop.first]
        other._read, other._notes = set(self._read), self._notes
        return other

    def _from_known(self, batch: int) -> Trace | None:
        for found in self._known:
            trace = found.loop.at(batch, self.chip.sm_count)
            if trace is not None:
                if found.torch not in self._notes:
                    self._notes[found.torch] = _note(found.torch)
                return replace(trace, notes=(*trace.notes, self._notes[found.torch]))
        return None

    def _from_shelves(self, batch: int) -> Trace | None:
        shelves: tuple[Shelf, ...] = (self.shelves.user, self.shelves.shipped)
        for number, shelf in enumerate(shelves):
            if number not in self._read:
                self._read.add(number)
                self._known += shelf.loops(self.job, self.chip)
            trace = self._from_known(batch)
            run = None if trace else shelf.run(self.job, self.chip, batch)
            if run is not None:
                self._known.append(run)
                trace = self._from_known(batch)
            if trace is not None:
                return trace
        return None

    def _traced(self, batch: int) -> Trace:
        fresh: Fresh = self._fresh or self.start()
        self._fresh = fresh
        if batch in FIT_BATCHES and not self._tried:  # whoever asks for these will ask for more
            self._tried = True
            for loop in fresh.loops(self.chip):
                self._keep(loop)
        trace = self._from_known(batch)
        if trace is None:
            self._keep(fresh.run(batch, self.chip))
            trace = self._from_known(batch)
        assert trace is not None
        return trace

    def _keep(self, loop: StoredLoop) -> None:
        self._known.append(Found(loop, installed_version("torch") or "?"))
        self.shelves.user.keep_loop(self.job, self.chip, loop)


def _note(torch: str) -> str:
    installed = installed_version("torch")
    if installed is None:
        how = f"beforehand with PyTorch {torch}, which is not installed here"
    else:
        how = f"with PyTorch {installed if public_version(installed) == public_version(torch) else torch}"
    return f"traced {how}; other versions keep other tensors"
