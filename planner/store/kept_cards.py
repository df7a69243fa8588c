"""The traces of one job for many cards, from shelves of kept traces; what none has is traced and kept."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from planner.jobs import Job
from planner.program import Floor, StoredLoop, Target, Trace, least_bytes
from planner.store.kept_tracer import Fresh, KeptTracer, Shelves


@dataclass(slots=True)
class KeptCards:
    """One tracer for each kind of GPU; they share what torch has to do."""

    job: Job
    shelves: Shelves
    start: Callable[[], Fresh]  # imports torch
    _tracers: dict[Target, KeptTracer] = field(default_factory=dict)
    _fresh: list[Fresh] = field(default_factory=list)  # one at most
    _numbers: dict[int, int] = field(default_factory=dict)  # of loops by their identity
    _distinct: dict[Hashable, int] = field(default_factory=dict)
    _kept: list[StoredLoop] = field(default_factory=list)  # so that no identity comes again

    def at(self, batch: int, chip: Target) -> Trace:
        """The whole trace."""
        return self._tracer(chip)(batch)

    def kin(self, batch: int, chip: Target) -> Hashable:
        """Which loop answers, with what its kernels take."""
        found = self._tracer(chip).answers(batch)
        if found is None:
            return None
        loop, answers = found
        return self._same(loop), answers

    def _same(self, loop: StoredLoop) -> int:
        """The number of the first loop that allocates as this one does beside what its kernels take."""
        if id(loop) not in self._numbers:
            known = (loop.own.events, loop.kernels, loop.blas_bytes)
            self._numbers[id(loop)] = self._distinct.setdefault(known, len(self._distinct))
            self._kept.append(loop)
        return self._numbers[id(loop)]

    def floor(self, chip: Target) -> Floor:
        """What the model's own tensors take at the least, where it has a loop."""
        loop = self._tracer(chip).loop()
        return (lambda batch: 0) if loop is None else least_bytes(loop.own.events)

    def loops(self, chip: Target) -> tuple[StoredLoop, ...]:
        """The job's loop on such a GPU, where it has one: `planner.store.kept_tracer.Fresh` over shelves."""
        loop = self._tracer(chip).loop()
        return () if loop is None else (loop,)

    def run(self, batch: int, chip: Target) -> StoredLoop:
        """What answers for one batch size."""
        tracer = self._tracer(chip)
        tracer(batch)
        found = tracer.answers(batch)
        assert found is not None  # it was just told
        return found[0]

    def _tracer(self, chip: Target) -> KeptTracer:
        if chip not in self._tracers:
            alike = (found for known, found in self._tracers.items() if known.capability == chip.capability)
            tracer = next(alike, None)
            fresh = KeptTracer(self.job, chip, self.shelves, self._start_once)
            self._tracers[chip] = fresh if tracer is None else tracer.beside(fresh)
        return self._tracers[chip]

    def _start_once(self) -> Fresh:
        if not self._fresh:
            self._fresh.append(self.start())
        return self._fresh[0]
